"""Are the nodes fit, alone and with each other?"""
