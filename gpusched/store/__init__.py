"""The job table: the only truth of the scheduler, with one writer.

sqlite      the table on disk (protocol `ports.Store`); durable when `commit` returns
memory      the same promises without a file, for simulations and tests
rows        how values become columns and come back
statements  the SQL of the hot path, each statement with a name
archive     how the table lets go of jobs that ended long ago
backup      copies of the table, made and put back
outside     files in folders that are others' to change
look        what the doctor sees of the table from outside
migrations  how a database of an older release is brought up to date
sql/        the schema, one file per migration
failures    what SQLite reports, as errors that say what to do

Nothing outside this package knows SQL. `tests/contract/test_store_contract.py` runs over both tables.
"""
