"""Colours and theme of the dashboard, for light and dark; no streamlit, no plotly.

Invariants
* Okabe-Ito colours (Nature Methods 8, 441, 2011), told apart also by symbol, hatch, dash or text.
* One meaning, one colour on all pages: measured is blue, predicted is orange; a gain is blue, a loss is
  vermilion and hatched.
* No colour here is plain black or white: figures must read on both backgrounds.
"""

from __future__ import annotations

BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
PINK = "#CC79A7"
SKY = "#56B4E9"
VERMILION = "#D55E00"
GREY = "#8C8C8C"
CATEGORICAL = (BLUE, ORANGE, GREEN, PINK, SKY, VERMILION, GREY)

MEASURED = BLUE
PREDICTED = ORANGE
GAIN = BLUE
LOSS = VERMILION
QUIET = "rgba(128,138,150,0.9)"  # notes and reference lines, on light and dark
GRID = "rgba(128,138,150,0.22)"

CIVIDIS = (
    "#00224E", "#123570", "#3B496C", "#575D6D", "#707173",
    "#8A8678", "#A59C74", "#C3B369", "#E1CC55", "#FEE838",
)  # fmt: skip
DIVERGING = (
    "#9E4500", "#C46A1B", "#DE9450", "#EFBE93", "#EDE7E1",
    "#E3E8EC", "#A3CBE3", "#5FA8D0", "#2585BB", "#005A8C",
)  # fmt: skip


def transparent(colour: str, alpha: float) -> str:
    """`#RRGGBB` as an rgba() colour with `alpha` in [0, 1]."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha:g})"


def streamlit_options() -> dict[str, object]:
    """Streamlit options (name -> value): offline, local, quiet, themed in light and dark."""
    return {
        "browser.gatherUsageStats": False,
        "client.showErrorDetails": "none",
        "client.toolbarMode": "viewer",
        "server.address": "127.0.0.1",
        "server.fileWatcherType": "none",
        "server.headless": True,
        "server.websocketPingInterval": 120,  # s; there is no proxy that a link must be kept open through
        "logger.level": "warning",
        "theme.baseFontSize": 15,
        "theme.baseRadius": "0.5rem",
        "theme.buttonRadius": "0.5rem",
        "theme.paddingTop": "2.25rem",
        "theme.headingFontSizes": ["1.75rem", "1.3rem", "1.1rem", "1rem", "0.95rem", "0.9rem"],
        "theme.headingFontWeights": [700, 650, 600, 600, 600, 600],
        "theme.metricValueFontSize": "1.45rem",
        "theme.metricValueFontWeight": 600,
        "theme.showSidebarBorder": True,
        "theme.chartCategoricalColors": list(CATEGORICAL),
        "theme.chartSequentialColors": list(CIVIDIS),
        "theme.chartDivergingColors": list(DIVERGING),
        "theme.light.primaryColor": BLUE,
        "theme.light.backgroundColor": "#FCFDFE",
        "theme.light.secondaryBackgroundColor": "#F1F4F8",
        "theme.light.textColor": "#1C2733",
        "theme.light.borderColor": "#DCE3EA",
        "theme.light.linkColor": "#005A8C",
        "theme.light.blueColor": BLUE,
        "theme.light.blueTextColor": "#005A8C",
        "theme.light.orangeColor": VERMILION,
        "theme.light.orangeTextColor": "#A84A00",
        "theme.light.sidebar.backgroundColor": "#F5F7FA",
        "theme.light.sidebar.secondaryBackgroundColor": "#E8EDF3",
        "theme.dark.primaryColor": "#1E7DBD",
        "theme.dark.backgroundColor": "#10161D",
        "theme.dark.secondaryBackgroundColor": "#1A232D",
        "theme.dark.textColor": "#E4EAF0",
        "theme.dark.borderColor": "#2C3845",
        "theme.dark.linkColor": SKY,
        "theme.dark.blueColor": SKY,
        "theme.dark.blueTextColor": "#7CC5EE",
        "theme.dark.orangeColor": "#F0803C",
        "theme.dark.orangeTextColor": "#F5A066",
        "theme.dark.sidebar.backgroundColor": "#0C1117",
        "theme.dark.sidebar.secondaryBackgroundColor": "#1A232D",
    }
