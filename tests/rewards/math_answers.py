"""Answer pairs written for this project: (response's answer, label). In RIGHT they mean the same, in WRONG they do not."""

RIGHT = [
    # integers and decimals
    ("42", "42"), ("42.", "42"), ("+42", "42"), ("-7", "-7"), ("0", "0"), ("042", "42"), ("12,345", "12345"),
    ("12345", "12,345"), ("1\\,000\\,000", "1000000"), ("3.0", "3"), ("2.50", "2.5"), (".5", "0.5"), ("1.5", "3/2"),
    ("\\text{5}", "5"), ("$17$", "17"), ("1.5\\times 10^{3}", "1500"), ("2^{10}", "1024"), ("4.5\\times10^{33}", "4.5e33"), ("4.5e33", "4.5 \\times 10^{33}"), ("1e-3", "0.001"), ("5!", "120"),
    # fractions
    ("1/2", "\\frac{1}{2}"), ("\\frac12", "\\frac{1}{2}"), ("\\dfrac{3}{4}", "\\frac{3}{4}"), ("\\tfrac{3}{4}", "0.75"),
    ("\\frac{2}{4}", "\\frac{1}{2}"), ("-\\frac{1}{3}", "\\frac{-1}{3}"), ("\\frac{-1}{3}", "-1/3"), ("3\\frac{1}{2}", "3.5"),
    ("\\frac{7}{2}", "3\\frac{1}{2}"), ("0.125", "\\frac18"),
    # roots, powers, constants
    ("\\sqrt{8}", "2\\sqrt{2}"), ("\\frac{1}{\\sqrt{2}}", "\\frac{\\sqrt{2}}{2}"), ("\\sqrt{3}/3", "\\frac{1}{\\sqrt 3}"),
    ("2\\pi", "2 \\pi"), ("\\frac{\\pi}{4}", "\\pi/4"), ("e^{2}", "e^2"), ("\\sqrt[3]{27}", "3"), ("2^{-1}", "\\frac12"),
    ("\\log_2 8", "3"), ("\\sin\\frac{\\pi}{6}", "\\frac{1}{2}"), ("5\\sqrt{2}+1", "1+5\\sqrt2"), ("3+2i", "2i+3"),
    # units, percent, money, degrees
    ("5\\text{ cm}", "5"), ("5 \\text{ cm}^2", "5"), ("5", "5\\text{ cm}"), ("90^\\circ", "90"), ("90", "90^{\\circ}"),
    ("\\$5.50", "5.50"), ("25\\%", "25\\%"), ("25", "25\\%"), ("0.25", "25\\%"), ("60\\text{ km/h}", "60"), ("12\\mathrm{ m}", "12"),
    ("5 apples", "5"),
    # expressions and equations
    ("x^2+2x+1", "(x+1)^2"), ("2x+1", "1+2x"), ("y=2x+1", "2x+1"), ("x=5", "5"), ("5", "x=5"), ("y = 3x - 2", "y=3x-2"),
    ("\\frac{x+1}{2}", "\\frac{x}{2}+\\frac{1}{2}"), ("a(b+c)", "ab+ac"), ("n(n+1)/2", "\\frac{n^2+n}{2}"), ("4a^2b", "4ba^2"),
    # sets, tuples, intervals
    ("\\{1,2\\}", "\\{2,1\\}"), ("1, 2", "2, 1"), ("1 \\text{ and } 2", "1,2"), ("\\{1,2,3\\}", "\\{3, 2, 1\\}"), ("\\pm 2", "-2, 2"),
    ("(1,2)", "(1, 2)"), ("\\left(\\frac12, 3\\right)", "(0.5, 3)"), ("(3,-1,4)", "(3, -1, 4)"), ("[0,1]", "[0, 1]"),
    ("(-\\infty, 3]", "(-\\infty,3]"), ("[0,1]\\cup(2,\\infty)", "(2,\\infty)\\cup[0,1]"), ("x\\in[0,1]", "[0,1]"),
    ("\\left[0,\\frac{1}{2}\\right)", "[0,0.5)"), ("\\emptyset", "\\emptyset"),
    # matrices, words, choices
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{bmatrix}1\\\\2\\end{bmatrix}"),
    ("\\begin{pmatrix} 1 & 0 \\\\ 0 & 1 \\end{pmatrix}", "\\begin{pmatrix}1&0\\\\0&1\\end{pmatrix}"),
    ("even", "\\text{even}"), ("\\text{Evelyn}", "Evelyn"), ("\\textbf{Yes}", "yes"), ("C", "\\text{(C)}"), ("(C)", "(C)"),
    ("\\text{(B)}", "\\text{B}"), ("\\textbf{(D)}", "(D)"), ("1010_2", "1010_{2}"),
]

WRONG = [
    ("41", "42"), ("-42", "42"), ("4 2", "42"), ("420", "42"), ("4.2", "42"), ("12345", "1234"), ("1 2", "12"), ("1000", "10000"), ("0.5001", "0.5"),
    ("2/1", "\\frac{1}{2}"), ("\\frac{1}{3}", "\\frac{1}{2}"), ("0.33", "\\frac13"), ("3.14", "\\pi"), ("3.14159", "\\pi"), ("1.41", "\\sqrt2"),
    ("2\\sqrt{3}", "3\\sqrt{2}"), ("\\sqrt{2}", "2"), ("2^{9}", "1024"), ("4.5e32", "4.5e33"), ("4.5", "4.5e33"), ("6!", "120"), ("-\\frac{1}{3}", "\\frac13"), ("\\frac{31}{2}", "3\\frac12"),
    ("26\\%", "25\\%"), ("2.5", "25\\%"), ("6\\text{ cm}", "5"), ("45^\\circ", "90"), ("6 apples", "5"), ("\\text{cm}", "5"),
    ("5 of 12 apples", "5"), ("2x+2", "2x+1"), ("x^2-1", "(x+1)^2"), ("x=6", "5"), ("y-x", "x-y"), ("a+b", "ab"), ("y=2x", "y=2x+1"),
    ("\\{1,2\\}", "\\{1,3\\}"), ("1", "1,2"), ("1,2,3", "1,2"), ("1,2,3,4,5", "3"), ("\\{1\\}", "\\{1,2\\}"), ("2", "-2, 2"),
    ("(2,1)", "(1,2)"), ("(1,2,3)", "(1,2)"), ("\\{1,2\\}", "(1,2)"), ("(2,1)", "\\{1,2\\}"),
    ("(0,1)", "[0,1]"), ("[0,1)", "[0,1]"), ("(1,2]", "(1,2)"), ("(-\\infty,3)", "(-\\infty,3]"), ("[0,2]", "[0,1]"), ("[0,1]", "[0,1]\\cup(2,\\infty)"),
    ("\\begin{pmatrix}2\\\\1\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
    ("odd", "\\text{even}"), ("neve", "\\text{even}"), ("Eve", "Evelyn"), ("D", "\\text{(C)}"), ("A or C", "\\text{(C)}"), ("no", "yes"),
    ("three", "3"), ("\\text{none}", "0"), ("", "0"), ("?", "7"), ("\\frac{1}{", "1"), ("{{{", "2"), ("\\infty", "10"), ("3+2i", "3-2i"), ("\\emptyset", "0"),
]

# Whole responses, label, right?
RESPONSES = [
    ("Adding gives 4.\nThe final answer is \\boxed{4}.<|im_end|>", "4", True),
    ("First \\boxed{3}, but no: \\boxed{4}", "4", True),
    ("First \\boxed{4}, but no: \\boxed{3}", "4", False),
    ("The roots are $\\boxed{1}$ and $\\boxed{2}$.", "1,2", True),
    ("\\boxed{1}, \\boxed{2}, \\boxed{3}", "2", False),
    ("\\boxed{\\frac{1}{\\sqrt{2}}}", "\\frac{\\sqrt2}{2}", True),
    ("\\boxed{4", "4", False),
    ("\\boxed{}", "4", False),
    ("\n12+34=46\n46-32=14\n<answer>14</answer>", "14", True),  # as data/small_qwen3.py teaches it
    ("<think>15?</think><answer> $\\frac{1}{2}$ </answer><|im_end|>", "0.5", True),
    ("<answer>15</answer> no:\n<answer>\nThe answer is 14.\n</answer>", "14", True),
    ("<answer>14</answer> no:\n<answer>15</answer>", "14", False),
    ("14\n<answer></answer>", "14", False),
    ("The answer is 4.", "4", True),
    ("The answer is $\\frac{1}{2}$.", "0.5", True),
    ("answer: (1, 2)", "(1,2)", True),
    ("answer: (1, 2)", "2", False),
    ("5 * 4 = 20\n#### 20", "20", True),
    ("**Answer:** 20", "20", True),
    ("So we get\n$x = 7$", "7", True),
    ("1, 2, 3, 4", "4", False),
    ("The answer is 1, 2, 3 or 4", "4", False),
    ("I get 42 apples.", "42", True),
    ("Of 50 people 42 stay.", "42", False),
    ("<think>maybe \\boxed{4}", "4", False),
    ("<think>maybe \\boxed{3}</think>\\boxed{4}", "4", True),
    ("<think>\\boxed{4}</think>I do not know", "4", False),
    ("The answer is 4<｜end▁of▁sentence｜>", "4", True),
    ("#### Step 1: add\n3 + 4 = 7\n\nSo the total is $7$.", "7", True),
    ("#### Conclusion\nThe total is $7$.", "7", True),
    ("3 + 4 = 7\n####7", "7", True),
    ("So.\n#### A", "A", True),
    ("So.\n#### True", "True", True),
    ("So.\n#### −5", "-5", True),
    ("So.\n#### x^2+1", "x^2+1", True),
    ("#### Final answer\n42", "42", True),
    ("#### \\frac{1}{2}", "0.5", True),
    ("", "4", False),
    ("I cannot solve this.", "4", False),
]
