-- What a run used of each card, its idle time, and where its energy comes from, what it cost and emitted; NULL if unknown.
ALTER TABLE runs ADD COLUMN measured TEXT CHECK (measured IS NULL OR json_valid(measured));
-- Power limit (W) that its cards were set to; NULL for the driver's own.
ALTER TABLE runs ADD COLUMN power_cap_w REAL CHECK (power_cap_w IS NULL OR power_cap_w > 0);
