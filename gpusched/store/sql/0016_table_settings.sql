-- Settings that end by themselves, and credits of budgets: by kind and name, each a document.
CREATE TABLE table_settings (
    kind      TEXT NOT NULL,
    name      TEXT NOT NULL,
    document  TEXT NOT NULL CHECK (json_valid(document)),
    PRIMARY KEY (kind, name)
) STRICT, WITHOUT ROWID;
