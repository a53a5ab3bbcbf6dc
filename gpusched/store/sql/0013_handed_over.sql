-- What the engine that a run is handed over to calls it; NULL for a run on the cluster's own nodes.
ALTER TABLE runs ADD COLUMN native TEXT CHECK (native IS NULL OR json_valid(native));
