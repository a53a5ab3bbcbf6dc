"""One module for each subject of the API: reads requests, asks the daemon, answers with documents."""
