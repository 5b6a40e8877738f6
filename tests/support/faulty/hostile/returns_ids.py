"""The most likely tokens, where logits are asked for."""

import sound


class Argmax(sound.Sound):
    def forward(self, ids):
        return super().forward(ids).argmax(-1)


def build(checkpoint_dir):
    model = Argmax(sound.sizes(checkpoint_dir))
    model.load_state_dict(sound.build(checkpoint_dir).state_dict())
    return model
