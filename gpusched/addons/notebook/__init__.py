"""Cells of a notebook as jobs: `%load_ext gpusched`."""

ENTRY_POINTS = {
    "ipython": "gpusched.addons.notebook.notebook:load_ipython_extension",
}
