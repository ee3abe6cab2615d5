"""After a failure: may the job go on, on which nodes, and from where?"""
