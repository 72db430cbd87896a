"""Tools that run a user's script unmodified and take over its training (`script_runner.run_script`)."""
