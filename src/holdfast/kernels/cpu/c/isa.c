/* The kernel for one instruction set. Compiled once per set, each time with its own compiler flags and its own
 * HOLDFAST_TABLE, the name under which holdfast.c finds it. */
#include "adam.h"
#include "backward.h"
#include "forward.h"
#include "linear.h"
#include "objective.h"
#include "perceptron.h"
#include "step.h"

extern const Isa HOLDFAST_TABLE;
const Isa HOLDFAST_TABLE = {ISA_NAME, LANES, forward, backward, linear_forward, linear_backward, step,
                            perceptron_forward, perceptron_backward, objective, adam};
