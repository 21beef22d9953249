"""What Mechanic costs over the bare base, in time and in memory."""
