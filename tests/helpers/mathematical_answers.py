"""Answers to mathematical questions: the ground truth, ways to write it, and what is wrong or only evaluates to it."""

CASES = [
    (
        r"42",
        [
            r"42",
            r"42.",
            r"\$42",
            r"42.0",
            r"x=42",
            r"x = 42",
            r"42\text{ cm}",
            r"42 \text{ cm}^2",
            r"\text{42}",
            r"$42$",
            r"42^\circ",
            r"40+2=42",
            r"42 apples",
            r"**42**",
            r"\mathbf{42}",
            r"42\,\text{m}",
            r"n = 42 \text{ dollars}",
        ],
        [
            r"6 \cdot 7",
            r"\frac{84}{2}",
            r"84/2",
            r"\sqrt{1764}",
            r"42!",
            r"6\times7",
            r"41+1",
            r"42x",
            r"4200\%",
            r"42\%",
            r"41=42",
            r"42, 42",
            r"42,43",
            r"42 \text{ or } 43",
            r"\pm 42",
            r"\{42\}",
            r"(42, 42)",
            r"\binom{42}{1}",
            r"\int_0^{42}dx",
            r"\sum_{k=1}^{42}1",
            r"\lfloor 42.5\rfloor",
            r"|{-42}|",
            r"2^5+10",
            r"\max(1,42)",
            r"\gcd(42,84)",
            r"\boxed{6 \cdot 7}",
            r"\text{not }42",
            r"41\frac{2}{2}",
            r"42\frac{0}{1}",
            r"\log_{10} 10^{42}",
            r"\lim_{x\to42}x",
            r"f(42)",
            r"x",
            r"42 \pmod{50}",
            r"\frac{42}{1}",
            r"0.42 \cdot 100",
            r"42 or 43",
            r"\approx 42",
            r"x\approx42",
            r"\det(42)",
            r"42\text{ or 43}",
            r"9^{9^{9^9}}",
            r"((((((((((10!)!)!)!)!)!)!)!)!)!",
            r"(9^9)^{9^9}",
        ],
    ),
    (
        r"385",
        [
            r"385",
        ],
        [
            r"\sum_{k=1}^{10} k^2",
            r"1+4+9+16+25+36+49+64+81+100",
        ],
    ),
    (
        r"120",
        [
            r"120",
        ],
        [
            r"\binom{10}{3}",
            r"5!",
        ],
    ),
    (
        r"9",
        [
            r"9",
        ],
        [
            r"\int_0^3 x^2dx",
            r"3^2",
        ],
    ),
    (
        r"3628800",
        [
            r"3628800",
            r"3,628,800",
            r"3{,}628{,}800",
            r"3\,628\,800",
            r"3,\!628,\!800",
        ],
        [
            r"10!",
        ],
    ),
    (
        r"1234",
        [
            r"1,234",
            r"1234",
            r"1{,}234",
        ],
        [
            r"1,2,34",
            r"12,34",
        ],
    ),
    (
        r"\frac{3}{4}",
        [
            r"3/4",
            r"\frac34",
            r"\dfrac34",
            r"\tfrac{3}{4}",
            r"0.75",
            r".75",
            r"x=\frac{3}{4}",
            r"\frac{3}{4} \text{ cm}",
        ],
        [
            r"6/8",
            r"\frac{6}{8}",
            r"\frac{1}{2}+\frac14",
            r"75\%",
            r"1-\frac14",
            r"3 \cdot \frac14",
            r"3\div4",
            r"\frac{3}{2^2}",
        ],
    ),
    (
        r"-\frac{1}{2}",
        [
            r"-\frac12",
            r"\frac{-1}{2}",
            r"-1/2",
            r"-0.5",
            r"-.5",
            r"- \frac{1}{2}",
        ],
        [
            r"\frac{1}{2}",
            r"-2/4",
        ],
    ),
    (
        r"2\sqrt{3}",
        [
            r"2\sqrt3",
            r"2 \sqrt{3}",
            r"\sqrt{12}",
            r"\sqrt{3}\cdot 2",
            r"2\sqrt{3}\text{ cm}",
            r"\sqrt{3} \times 2",
            r"2√3",
        ],
        [
            r"3.4641",
            r"3.46410161513775458705489268301174",
            r"\sqrt{3}",
            r"2\sqrt{3}, 2\sqrt{3}",
            r"\pm 2\sqrt{3}",
        ],
    ),
    (
        r"\frac{\pi}{2}",
        [
            r"\pi/2",
            r"\frac\pi2",
            r"\dfrac{\pi}{2}",
            r"0.5\pi",
            r"\frac{1}{2}\pi",
        ],
        [
            r"\arcsin 1",
            r"1.5708",
            r"\pi",
            r"\int_0^{\pi/2}dx",
        ],
    ),
    (
        r"7\frac{3}{4}",
        [
            r"7 \frac{3}{4}",
            r"\frac{31}{4}",
            r"7.75",
            r"7 3/4",
        ],
        [
            r"\frac{21}{4}",
            r"5.25",
            r"6\frac{7}{4}",
        ],
    ),
    (
        r"(3, \frac{\pi}{2})",
        [
            r"\left( 3, \frac{\pi}{2} \right)",
            r"(3,\pi/2)",
            r"(x,y)=(3,\frac{\pi}{2})",
        ],
        [
            r"(\frac{\pi}{2},3)",
            r"(1+2,\frac{\pi}{2})",
            r"[3,\frac{\pi}{2}]",
            r"(3)",
        ],
    ),
    (
        r"(-\infty, 2) \cup (3, \infty)",
        [
            r"(-\infty,2)\cup(3,\infty)",
            r"(-\infty,2)\cup(3,+\infty)",
            r"x \in (-\infty, 2) \cup (3, \infty)",
            r"(3,\infty)\cup(-\infty,2)",
        ],
        [
            r"(-\infty,2]\cup(3,\infty)",
            r"(-\infty,2)",
        ],
    ),
    (
        r"\{1,2,3\}",
        [
            r"\left\{1, 2, 3\right\}",
            r"\{3,2,1\}",
        ],
        [
            r"1,2,3",
            r"\{1,2\}",
            r"\{1,2,2\}",
            r"\{1,1+1,3\}",
        ],
    ),
    (
        r"1, 3",
        [
            r"3, 1",
            r"1,3",
            r"x=1, x=3",
            r"1 \text{ and } 3",
            r"x=1 \text{ or } x=3",
            r"1 and 3",
        ],
        [
            r"1",
            r"1,3,5",
            r"(1,3)",
            r"1,1",
            r"1,3,3",
        ],
    ),
    (
        r"-2 \pm \sqrt{3}",
        [
            r"-2\pm\sqrt3",
            r"-2+\sqrt{3}, -2-\sqrt{3}",
            r"-2-\sqrt{3}, -2+\sqrt{3}",
        ],
        [
            r"-2+\sqrt3",
        ],
    ),
    (
        r"\text{(A)}",
        [
            r"A",
            r"(A)",
            r"\text{A}",
            r"\textbf{(A)}",
            r"\mathrm{(A)}",
        ],
        [
            r"B",
            r"A, B",
            r"AB",
            r"(A),(B)",
            r"\text{A or B}",
        ],
    ),
    (
        r"A",
        [
            r"A",
            r"(A)",
            r"\text{(A)}",
        ],
        [
            r"B",
            r"A,B",
        ],
    ),
    (
        r"\text{Evelyn}",
        [
            r"Evelyn",
            r"evelyn",
        ],
        [
            r"nylevE",
            r"Evelyn or Bob",
        ],
    ),
    (
        r"x^2+1",
        [
            r"1+x^2",
            r"x^{2}+1",
            r"x^2 + 1",
            r"f(x) = x^2+1",
        ],
        [
            r"x^2",
            r"x^2-1",
            r"x^2+1, x",
        ],
    ),
    (
        r"x^2 + 2xy + y^2",
        [
            r"(x+y)^2",
            r"y^2+2xy+x^2",
        ],
        [
            r"(x-y)^2",
            r"x^2+y^2",
        ],
    ),
    (
        r"90^\circ",
        [
            r"90",
            r"90^{\circ}",
            r"90°",
            r"90 \text{ degrees}",
        ],
        [
            r"\frac{180}{2}",
        ],
    ),
    (
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
        [
            r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
            r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}",
        ],
        [
            r"\begin{pmatrix}1&3\\2&4\end{pmatrix}",
            r"\begin{pmatrix}1&2&3&4\end{pmatrix}",
            r"\begin{pmatrix}1&1+1\\3&4\end{pmatrix}",
        ],
    ),
    (
        r"50\%",
        [
            r"50\%",
            r"50",
            r"50%",
        ],
        [
            r"0.5",
            r"\frac{1}{2}",
            r"25 \cdot 2\%",
        ],
    ),
    (
        r"y = 2x + 1",
        [
            r"y=2x+1",
            r"2x+1",
            r"y=1+2x",
        ],
        [
            r"z=2x+1",
            r"2x+2",
        ],
    ),
    (
        r"x=1, y=2",
        [
            r"y=2, x=1",
            r"x=1,y=2",
        ],
        [
            r"x=2,y=1",
        ],
    ),
    (
        r"10!",
        [
            r"10!",
        ],
        [
            r"9!",
        ],
    ),
    (
        r"\binom{10}{3}",
        [
            r"\binom{10}{3}",
        ],
        [
            r"121",
        ],
    ),
    (
        r"2^{10}",
        [
            r"1024",
            r"2^{10}",
            r"2^10",
        ],
        [
            r"1023",
        ],
    ),
    (
        r"\ln 2",
        [
            r"\ln(2)",
            r"\ln{2}",
            r"\frac{1}{2}\ln 4",
        ],
        [
            r"\log_{e}2",
            r"0.693",
        ],
    ),
    (
        r"3+4i",
        [
            r"3 + 4i",
            r"4i+3",
        ],
        [
            r"4+3i",
            r"5",
        ],
    ),
    (
        r"\infty",
        [
            r"\infty",
            r"+\infty",
            r"∞",
        ],
        [
            r"-\infty",
        ],
    ),
    (
        r"1.5 \times 10^{3}",
        [
            r"1500",
            r"1.5\cdot10^3",
        ],
        [
            r"150",
        ],
    ),
    (
        r"0.5",
        [
            r"0.5",
            r".5",
            r"1/2",
            r"0.50",
        ],
        [
            r"5/10",
            r"0.5 \cdot 1",
            r"50\%",
        ],
    ),
    (
        r"\frac{1}{3}",
        [
            r"1/3",
        ],
        [
            r"0.333",
            r"0.3333333333333333",
        ],
    ),
    (
        r"\frac{\sqrt{3}}{2}",
        [
            r"\frac{\sqrt3}{2}",
            r"\sqrt{3}/2",
            r"\frac{1}{2}\sqrt{3}",
            r"\dfrac{\sqrt{3}}{2}",
        ],
        [
            r"\sin 60^\circ",
            r"\cos(30)",
            r"0.866",
        ],
    ),
    (
        r"25\pi",
        [
            r"25 \pi",
            r"25\pi \text{ cm}^2",
        ],
        [
            r"78.54",
            r"\int_0^{2\pi} 12.5 d\theta",
        ],
    ),
    (
        r"\sqrt{2}+\sqrt{3}",
        [
            r"\sqrt3+\sqrt2",
        ],
        [
            r"\sqrt{5}",
        ],
    ),
    (
        r"e^{-x}",
        [
            r"e^{-x}",
            r"\frac{1}{e^x}",
        ],
        [
            r"e^x",
        ],
    ),
    (
        r"\sin^2 x",
        [
            r"\sin^2(x)",
            r"(\sin x)^2",
        ],
        [
            r"\sin x^2",
            r"1-\cos^2 x",
        ],
    ),
]
