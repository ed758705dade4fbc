from holdfast.doctor.report import Report


def page(report: Report) -> str:
    return ""
