-- The priority that the job had when this run was decided; null for runs started before and adopted ones.
ALTER TABLE runs ADD COLUMN priority REAL;
