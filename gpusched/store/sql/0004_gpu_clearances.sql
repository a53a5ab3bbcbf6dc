-- When somebody last said that a GPU is well, and the errors it had counted by then: they do not speak against it any
-- more, also when the kernel's log is read anew.
CREATE TABLE gpu_clearances (
    uuid       TEXT NOT NULL PRIMARY KEY CHECK (length(uuid) > 0),
    at         REAL NOT NULL,
    ecc_errors INTEGER CHECK (ecc_errors >= 0)
) STRICT, WITHOUT ROWID;
