"""The job table: the only truth of the scheduler, with one writer.

sqlite         the table on disk (protocol `ports.Store`); durable when `commit` returns
memory         the same promises without a file, for simulations and tests: twice as fast as SQLite in memory
rows           how values become columns and come back
statements     the SQL, each statement with a name
schema         how a database of an older release is brought up to date
sql/           the schema, one file per migration
backup         copies of the table, made and restored
read_only      the table as the doctor and `gpusched simulate` read it beside the daemon
database_file  whether the file is still the one that is open, and what is wrong with it in sentences

Nothing outside this package knows SQL. `tests/contract/test_store_contract.py` runs over both tables.
"""
