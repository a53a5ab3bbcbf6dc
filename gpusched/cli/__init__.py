"""The commands: each parses its command line, calls the daemon and prints the answer.

    gsub grun gq gcancel gwait glogs gshow ginfo ghist gctl gpuschedd    one file per command
    admin/          gpusched itself: daemon, doctor, config, backups, installation
    options, job_options, parse, script, submission, updates    tables of options, and values read with them
    help            --help and shell completion, made from the same tables; loaded only for these
    output          JSON, bare values, messages, errors
    tables, query   tables with one `Column` per column; query strings and cells that commands share
    forecast, pipelines, dag, follow, relay, slurm_format    what several commands load only when it is asked for

What runs at every prompt (gsub, gq in a pipe, gcancel, gwait) imports nothing heavy; a test lists it.
"""
