"""Dumps of graphs and plans: text, JSON and diagrams."""

from lazykv.inspect.collect import describe as describe
from lazykv.inspect.collect import describe_plan as describe_plan
from lazykv.inspect.diagram import to_dot as to_dot
from lazykv.inspect.diagram import to_mermaid as to_mermaid
from lazykv.inspect.document import Document as Document
from lazykv.inspect.summary import summary_json as summary_json
from lazykv.inspect.summary import summary_text as summary_text
from lazykv.inspect.text import graph_text as graph_text
from lazykv.inspect.text import plan_text as plan_text
