"""The job file of a story in a process of its own: ONCEFLOW_STORY says which one."""

import json
import os

from story import Story

story = Story(**json.loads(os.environ["ONCEFLOW_STORY"])).job()
