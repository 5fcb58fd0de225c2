"""`quire simulate`: requests, replicas, routers, baselines and figures over engines of machines that are not here."""
