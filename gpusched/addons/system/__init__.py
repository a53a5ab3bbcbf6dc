"""`gpusched system`: units, links and pages of a scheduler for all users of a machine, put in place and taken away.

system_plan   what is to be where, as steps that say what they do
command       `gpusched system install` and `uninstall`
guard         keeps processes outside of jobs off the GPUs, also from boot on
man_pages     the manual pages, from the declarations of the commands
"""

ENTRY_POINTS = {"command.system": "gpusched.addons.system.command:app"}
