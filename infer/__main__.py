"""`python -m infer` is `infer`."""

from infer.cli.app import main

if __name__ == "__main__":
    main()
