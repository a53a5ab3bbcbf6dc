-- What a step has on each of its nodes; empty for one on the node of its srun alone, as all of them were.
ALTER TABLE steps ADD COLUMN parts TEXT NOT NULL DEFAULT '[]' CHECK (json_valid(parts));
