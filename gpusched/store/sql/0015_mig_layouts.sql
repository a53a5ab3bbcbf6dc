-- MIG layouts that were set for cards by command: what was made last, and what is to be made once the card is idle.
CREATE TABLE mig_layouts (
    uuid        TEXT NOT NULL PRIMARY KEY,
    document    TEXT NOT NULL CHECK (json_valid(document))
) STRICT;
