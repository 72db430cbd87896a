"""What a run is given: arguments, their validation, and the environment of a launcher."""
