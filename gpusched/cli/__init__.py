"""The commands: each parses its command line, calls the daemon and prints the answer.

    gsub grun gq gcancel gwait glogs gshow ginfo gtop ghist gctl gpuschedd    one file per command
    admin/          gpusched itself: daemon, doctor, config, backups, installation
    options, job_options, parse, submission    option tables and the values read with them
    help            --help and shell completion, generated from the same tables; loaded only when requested
    output          JSON, bare values, messages, errors
    tables, query   tables with one `Column` per column; query strings and cells that commands share
    forecast, pipelines, dag, follow, relay, slurm_format    rarer features, loaded on demand

Commands that run at every prompt (gsub, gq in a pipe, gcancel, gwait) import nothing heavy; a test keeps the list.
"""
