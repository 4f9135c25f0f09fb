collect_ignore = ["faulty_script.py"]  # it is launched, not imported
