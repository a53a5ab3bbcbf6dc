"""One module for each subject of the API: reads requests, calls the daemon, answers with documents."""
