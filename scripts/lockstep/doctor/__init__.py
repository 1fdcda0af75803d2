"""What can this machine do, and do ranks meet on it? Do several machines reach each other?"""
