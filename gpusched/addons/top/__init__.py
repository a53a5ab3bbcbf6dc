"""gtop: a live view of cards and queue. `frame` and `state` are pure; `app` draws and reads keys; `feed` talks."""

ENTRY_POINTS = {
    "gtop": "gpusched.addons.top.gtop:body",
}
