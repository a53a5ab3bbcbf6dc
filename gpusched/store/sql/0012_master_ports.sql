-- The port that is reserved on the run's first node, for its ranks to meet at; null for runs without one.
ALTER TABLE runs ADD COLUMN master_port INTEGER CHECK (master_port BETWEEN 1 AND 65535);
