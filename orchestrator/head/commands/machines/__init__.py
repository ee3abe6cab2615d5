"""Commands on the machines of the node list: nodes, doctor, exec, ssh, pull, push."""
