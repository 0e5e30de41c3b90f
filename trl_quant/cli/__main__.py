"""`python -m trl_quant.cli` is `trl-quant`."""

from trl_quant.cli import main


main()
