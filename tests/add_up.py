"""What the JUnit reports of ./dev test come to, as its last line: add_up.py FAILED REPORT..., FAILED as 1 where a stage failed
that may have written no report."""

import sys
import xml.etree.ElementTree as xml

count = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
for path in sys.argv[2:]:
    for suite in xml.parse(path).getroot().iter("testsuite"):
        for key in count:
            count[key] += int(suite.get(key, 0))
failed = max(count["failures"] + count["errors"], int(sys.argv[1]))
print(f"{count['tests'] - count['failures'] - count['errors'] - count['skipped']} passed, {failed} failed, "
      f"{count['skipped']} skipped")
