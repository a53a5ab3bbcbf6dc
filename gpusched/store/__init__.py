"""The job table: the scheduler's single source of truth, with one writer.

sqlite         the table on disk (protocol `ports.Store`); durable when `commit` returns
memory         the same promises without a file, for simulations and tests: twice as fast as SQLite in memory
rows           conversion of values to columns and back
statements     the SQL, each statement with a name
schema         migration of a database from an older release
sql/           the schema, one file per migration
backup         backing up and restoring the table
read_only      the table as the doctor and `gpusched simulate` read it beside the daemon
database_file  whether the open file is still the one at its path, and its problems in sentences

Nothing outside this package knows SQL. `tests/contract/test_store_contract.py` runs over both tables.
"""
