-- Why something is kept, for all to see; of one that is kept for nobody, the maintenance that it is for.
ALTER TABLE reservations ADD COLUMN message TEXT NOT NULL DEFAULT '';
