-- What an event tells of, where its watch tells of each thing once: until now the first words of its text told. Of what
-- a run was told before, it may be told once more.
ALTER TABLE job_events ADD COLUMN about TEXT;
