-- Runs that were started on a spent budget.
ALTER TABLE runs ADD COLUMN is_filler INTEGER NOT NULL DEFAULT 0 CHECK (is_filler IN (0, 1));
