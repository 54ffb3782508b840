"""A web service under load whose processes are killed: what it accepted is finished, and once."""

#: The variable that says where the state and the notes are.
FOLDER = "MAESTRO_SHOP_FOLDER"
#: The parts of an order: steps with an effect.
PARTS = ("charge", "pack")
#: For how long the service waits for its runs when it is stopped.
GRACE_SECONDS = 1.0
