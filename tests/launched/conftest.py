collect_ignore_glob = ["*_script.py"]  # they are launched, not imported
