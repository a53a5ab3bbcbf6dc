-- Why a node or GPU is drained: until now only the message told, by how it begins. Messages from before texts had marks
-- of what they mention may be inside of one.
ALTER TABLE drains ADD COLUMN cause TEXT NOT NULL DEFAULT 'admin';
UPDATE drains SET cause = CASE
    WHEN message GLOB 'suspect: was lost*' THEN 'gpu_lost'
    WHEN message GLOB 'suspect: XID *' THEN 'gpu_fault'
    ELSE 'early_failures'
END, message = substr(message, 10)
WHERE message GLOB 'suspect: *';
UPDATE drains SET cause = 'early_failures', message = substr(message, 1, 3) || substr(message, 13)
WHERE message GLOB char(2) || '[?]' || char(31) || 'suspect: *';
UPDATE drains SET cause = 'early_failures', message = '"' || substr(message, 11)
WHERE message GLOB '"suspect: *';
UPDATE drains SET cause = 'down'
WHERE target IN (SELECT target FROM drainers WHERE down IS NOT NULL);
UPDATE drains SET cause = 'site_program'
WHERE message GLOB '*; once it is fixed: gctl undrain *' AND target NOT IN (SELECT target FROM drainers);
