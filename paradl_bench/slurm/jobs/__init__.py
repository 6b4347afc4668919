"""A chain of jobs as files: the site, the request, the plan, and the script of each job."""
