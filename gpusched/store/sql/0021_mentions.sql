-- Texts mark the jobs and reservations that they mention, so that each reader is shown only those that they may know.
-- Of an older text that may name some, nobody can tell which: marked as such, it is for those who may know all of them.
UPDATE jobs SET reason_text = char(2) || '?' || char(31) || reason_text || char(3)
WHERE reason_text LIKE '%job%' OR reason_text LIKE '%reservation%';
UPDATE runs SET reason_text = char(2) || '?' || char(31) || reason_text || char(3)
WHERE reason_text LIKE '%job%' OR reason_text LIKE '%reservation%';
UPDATE job_events SET text = char(2) || '?' || char(31) || text || char(3)
WHERE text LIKE '%job%' OR text LIKE '%reservation%';
UPDATE drains SET message = char(2) || '?' || char(31) || message || char(3)
WHERE message LIKE '%job%' OR message LIKE '%reservation%';
