"""The command line: the program `infer`."""
