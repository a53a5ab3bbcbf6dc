-- What a gang's run books on each of its nodes, by rank; an empty list for a run on one node.
ALTER TABLE runs ADD COLUMN parts TEXT NOT NULL DEFAULT '[]' CHECK (json_valid(parts));
