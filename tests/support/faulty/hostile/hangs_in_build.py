"""Never gets built."""


def build(checkpoint_dir):
    while True:
        pass
