"""The commands: each parses its words, calls the daemon, prints what comes back.

    options    the tables of options, one per command, as data
    parse      words -> values, by a table; also for #GSUB and #SBATCH lines
    output     human, JSON or bare values; errors; tables
    manual     --help and shell completion, made from the same tables; loaded only for these
    gsub grun gq gcancel gwait glogs gshow ginfo ghist gctl    one file per command
    admin      gpusched itself: daemon, doctor, config, demo

What runs at every prompt (gsub, gq in a pipe, gcancel, gwait) imports nothing heavy; a test lists it.
"""
