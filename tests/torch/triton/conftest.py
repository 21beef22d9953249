"""What runs in processes of its own is not collected: importing it would import Triton."""

collect_ignore = ["ahead_of_time.py", "capturing.py", "forcing.py", "interpreted.py", "sharded.py"]
