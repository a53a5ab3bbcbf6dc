-- Texts mark the jobs and reservations that they mention, so that each reader is shown only those that they may know.
-- Of an older text that may name some, nobody can tell which: marked as such, it is for those who may know all of them.
UPDATE jobs SET reason_text = char(2) || '?' || char(31) || reason_text || char(3)
WHERE reason_text LIKE '%job%' OR reason_text LIKE '%reservation%';
UPDATE runs SET reason_text = char(2) || '?' || char(31) || reason_text || char(3)
WHERE reason_text LIKE '%job%' OR reason_text LIKE '%reservation%';
DROP TRIGGER job_events_are_append_only;
UPDATE job_events SET text = char(2) || '?' || char(31) || text || char(3)
WHERE text LIKE '%job%' OR text LIKE '%reservation%';
CREATE TRIGGER job_events_are_append_only BEFORE UPDATE ON job_events
BEGIN
    SELECT RAISE(ABORT, 'the story of a job is only added to');
END;
UPDATE drains SET message = char(2) || '?' || char(31) || message || char(3)
WHERE message LIKE '%job%' OR message LIKE '%reservation%';
