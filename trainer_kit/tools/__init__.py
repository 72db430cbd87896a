"""Tools that run a user's own script, unmodified, with its training taken over (`takeover.run_script`)."""
