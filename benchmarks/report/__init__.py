"""Tables and figures from the records alone."""
