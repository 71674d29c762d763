/* The fast path of `dispatch` (dispatch.py): find the program that was recorded for a call, and run it.

`call` is BatchTensor's `__torch_function__`. It builds the same key as `DescribedCall` (replay.py), so that both find
each other's programs, and checks the same conditions. A call that has no program, or is unusual in any way, is made by
`dispatch`, which decides everything. Only the limited API is used: one build serves every Python from 3.10 on, and
every torch, as nothing of torch's C++ is used. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030a0000
#include <Python.h>

#define VERSION 2 /* of what engine.py relies on: a module that was built before a change is not used */
#define MOST_KEYS 192 /* of parts of a key, and so on: a call with more is made by `dispatch` */
#define MOST_INPUTS 64

/* What `configure` is given: objects of duoka and torch, by name. */
#define NAMES(X)                                                                                                       \
    X(batch) X(tensor) X(parameter) X(size) X(constants) X(true) X(false) X(list) X(tuple) X(plain) X(outdated)       \
    X(dispatch) X(made) X(failed) X(count_write) X(replicate) X(may_raise) X(may_fail) X(by_item) X(transform_level)              \
    X(in_forward_mode) X(count_dispatch_modes) X(is_inference_mode) X(is_grad_enabled) X(make_wrapper) X(zero) X(one)              \
    X(modes_are_active) X(is_enabled) X(module_hooks)

enum {
#define X(name) OF_##name,
    NAMES(X)
#undef X
        COUNT
};
static const char *const names[] = {
#define X(name) #name,
    NAMES(X)
#undef X
};
static PyObject *given[COUNT];
#define THE(name) given[OF_##name]

/* Names of attributes. */
#define ATTRIBUTES(X)                                                                                                  \
    X(_meta) X(_rows) X(_cached) X(_adopted) X(spec) X(view) X(shape) X(dtype) X(device) X(local_shape) X(programs)    \
    X(aliased) X(copies) X(shares) X(count) X(exact) X(of_parameters) X(has_sharded) X(requires_grad) X(is_leaf)       \
    X(start) X(stop) X(step) X(_here) X(around) X(whole) X(_ordinary) X(_compiled) X(is_on_rows) X(recomputed)         \
    X(_backward_hooks) X(_compiled_call_impl)

enum {
#define X(name) A_##name,
    ATTRIBUTES(X)
#undef X
        ATTRIBUTE_COUNT
};
static PyObject *attributes[ATTRIBUTE_COUNT];
#define GET(object, name) PyObject_GetAttr(object, attributes[A_##name])

typedef struct {
    PyObject *keys[MOST_KEYS]; /* owned */
    PyObject *inputs[MOST_INPUTS]; /* owned */
    PyObject *batches[MOST_INPUTS]; /* borrowed from the arguments */
    int plain[MOST_INPUTS];
    int key_count, input_count, batch_count, plain_count;
} Call;

/* Results of functions that may have nothing to return: */
enum { FAILED = -1, NO = 0, YES = 1 }; /* FAILED: an exception is set */

static void clear_call(Call *call)
{
    for (int i = 0; i < call->key_count; i++)
        Py_DECREF(call->keys[i]);
    for (int i = 0; i < call->input_count; i++)
        Py_DECREF(call->inputs[i]);
}

/* Add a part of the key; takes over the reference, NULL is an error. */
static int add_key(Call *call, PyObject *part)
{
    if (part == NULL)
        return FAILED;
    if (call->key_count == MOST_KEYS) {
        Py_DECREF(part);
        return NO;
    }
    call->keys[call->key_count++] = part;
    return YES;
}

/* Add an input, of which there must be fewer than MOST_INPUTS; takes over the reference, NULL is an error. */
static int add_input(Call *call, PyObject *value)
{
    if (value == NULL)
        return FAILED;
    call->inputs[call->input_count++] = value;
    return YES;
}

#define ADD(step)                                                                                                      \
    do {                                                                                                               \
        int added = (step);                                                                                            \
        if (added != YES)                                                                                              \
            return added;                                                                                              \
    } while (0)

static PyObject *ref(PyObject *object)
{
    Py_INCREF(object);
    return object;
}

static int add(Call *call, PyObject *value);

static int add_sequence(Call *call, PyObject *value, PyObject *kind)
{
    int is_list = PyList_Check(value);
    Py_ssize_t count = is_list ? PyList_Size(value) : PyTuple_Size(value);
    ADD(add_key(call, ref(kind)));
    ADD(add_key(call, PyLong_FromSsize_t(count)));
    for (Py_ssize_t i = 0; i < count; i++)
        ADD(add(call, is_list ? PyList_GetItem(value, i) : PyTuple_GetItem(value, i)));
    return YES;
}

static int add_dict(Call *call, PyObject *value)
{
    PyObject *name, *one;
    Py_ssize_t place = 0;
    ADD(add_key(call, ref((PyObject *)&PyDict_Type)));
    while (PyDict_Next(value, &place, &name, &one)) {
        ADD(add_key(call, ref(name)));
        ADD(add(call, one));
    }
    return YES;
}

static int add_slice(Call *call, PyObject *value)
{
    static const int parts[] = {A_start, A_stop, A_step};
    ADD(add_key(call, ref((PyObject *)&PySlice_Type)));
    for (int i = 0; i < 3; i++) {
        PyObject *part = PyObject_GetAttr(value, attributes[parts[i]]);
        if (part != NULL && part != Py_None && !PyLong_CheckExact(part)) {
            Py_DECREF(part);
            return NO;
        }
        ADD(add_key(call, part));
    }
    return YES;
}

/* The properties of a plain tensor that rules decide by: attributes, or results of methods without arguments. */
static int add_plain(Call *call, PyObject *value)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(THE(plain)); i++) {
        PyObject *found = PyObject_GetAttr(value, PyTuple_GetItem(THE(plain), i));
        if (found != NULL && PyCFunction_Check(found)) {
            PyObject *method = found;
            found = PyObject_CallNoArgs(method);
            Py_DECREF(method);
            if (found == NULL) { /* a sparse tensor has no strides */
                PyErr_Clear();
                return NO;
            }
        }
        ADD(add_key(call, found));
    }
    call->plain[call->plain_count++] = call->input_count;
    return add_input(call, ref(value));
}

/* Add an argument to key and inputs, as `DescribedCall._add`. NO: it has an unknown type. */
static int add(Call *call, PyObject *value)
{
    PyObject *kind = (PyObject *)Py_TYPE(value);
    if (call->input_count == MOST_INPUTS)
        return NO;
    if (kind == THE(batch)) {
        ADD(add_key(call, GET(value, _meta)));
        call->batches[call->batch_count++] = value;
        return add_input(call, GET(value, _rows));
    }
    if (kind == THE(tensor) || kind == THE(parameter))
        return add_plain(call, value);
    if (kind == (PyObject *)&PyLong_Type) {
        ADD(add_key(call, ref(value)));
        return add_key(call, ref(kind));
    }
    if (kind == (PyObject *)&PyBool_Type)
        return add_key(call, ref(value == Py_True ? THE(true) : THE(false)));
    if (kind == (PyObject *)&PyFloat_Type || kind == (PyObject *)&PyComplex_Type) {
        ADD(add_key(call, ref(kind)));
        int is_zero = PyObject_RichCompareBool(value, THE(zero), Py_EQ);
        int is_one = is_zero ? 0 : PyObject_RichCompareBool(value, THE(one), Py_EQ);
        ADD(add_key(call, ref(is_zero || is_one ? value : Py_None)));
        return add_input(call, ref(value));
    }
    if (kind == (PyObject *)&PyTuple_Type || kind == THE(size))
        return add_sequence(call, value, THE(tuple));
    if (kind == (PyObject *)&PyList_Type)
        return add_sequence(call, value, THE(list));
    int is_constant = PySet_Contains(THE(constants), kind);
    if (is_constant == 1)
        return add_key(call, ref(value));
    if (kind == (PyObject *)&PySlice_Type)
        return add_slice(call, value);
    if (kind == (PyObject *)&PyDict_Type)
        return add_dict(call, value);
    return is_constant;
}

/* Note which inputs are the same object: part of the key. */
static int add_repeated(Call *call)
{
    int last[MOST_INPUTS], repeated = 0;
    for (int i = 0; i < call->input_count; i++) {
        last[i] = i;
        for (int j = call->input_count - 1; j > i; j--)
            if (call->inputs[i] == call->inputs[j]) {
                last[i] = j;
                repeated = 1;
                break;
            }
    }
    for (int i = 0; repeated && i < call->input_count; i++)
        ADD(add_key(call, PyLong_FromLong(last[i])));
    return YES;
}

/* Describe a call, as `DescribedCall`. NO: it has no key. */
static int describe(Call *call, PyObject *func, PyObject *args, PyObject *kwargs)
{
    call->key_count = call->input_count = call->batch_count = call->plain_count = 0;
    ADD(add_key(call, ref(func)));
    Py_ssize_t count = PyTuple_Size(args);
    for (Py_ssize_t i = 0; i < count; i++)
        ADD(add(call, PyTuple_GetItem(args, i)));
    if (kwargs != NULL && PyDict_Size(kwargs) > 0)
        ADD(add_dict(call, kwargs));
    return add_repeated(call);
}

static PyObject *tuple_of(PyObject **items, int count)
{
    PyObject *tuple = PyTuple_New(count);
    for (int i = 0; tuple != NULL && i < count; i++)
        PyTuple_SetItem(tuple, i, ref(items[i]));
    return tuple;
}

static PyObject *list_of(PyObject **items, int count)
{
    PyObject *list = PyList_New(count);
    for (int i = 0; list != NULL && i < count; i++)
        PyList_SetItem(list, i, ref(items[i]));
    return list;
}

/* Whether an attribute is `wanted` (an object); takes no reference. */
static int attribute_is(PyObject *object, int name, PyObject *wanted)
{
    PyObject *found = PyObject_GetAttr(object, attributes[name]);
    if (found == NULL)
        return FAILED;
    Py_DECREF(found);
    return found == wanted;
}

/* Whether a function without arguments returns `wanted`. */
static int returns(PyObject *function, PyObject *wanted)
{
    PyObject *found = PyObject_CallNoArgs(function);
    if (found == NULL)
        return FAILED;
    int same = found == wanted ? YES : PyObject_RichCompareBool(found, wanted, Py_EQ);
    Py_DECREF(found);
    return same;
}

/* YES if no transform and no dispatch mode sees operators; they may be allowed, which `dispatch` decides. */
static int nothing_observes(void)
{
    ADD(returns(THE(transform_level), Py_None));
    ADD(returns(THE(count_dispatch_modes), THE(zero)));
    return returns(THE(in_forward_mode), Py_False);
}

/* YES if the view of a call's batches asks for nothing but the program. */
static int is_ordinary(PyObject *view)
{
    ADD(attribute_is(view, A_of_parameters, Py_False));
    ADD(attribute_is(view, A_has_sharded, Py_False));
    ADD(attribute_is(view, A_device, Py_None));
    PyObject *aliased = GET(view, aliased), *copies = aliased == NULL ? NULL : GET(aliased, copies);
    Py_XDECREF(aliased);
    if (copies == NULL)
        return FAILED;
    Py_ssize_t held = PyObject_Size(copies);
    Py_DECREF(copies);
    return held < 0 ? FAILED : held == 0;
}

/* YES if all shares but one are other processes', and gradients are those of the rows. */
static int is_one_share(PyObject *shares)
{
    ADD(attribute_is(shares, A_exact, Py_False));
    PyObject *count = GET(shares, count);
    if (count == NULL)
        return FAILED;
    int alone = PyObject_RichCompareBool(count, THE(one), Py_EQ);
    Py_DECREF(count);
    return alone;
}

/* YES if a function raises no error for the values of single rows, which the ranks would have to tell each other. */
static int raises_alike(Call *call, PyObject *func, PyObject *args)
{
    int may_raise = PySet_Contains(THE(may_raise), func);
    if (may_raise != 1)
        return may_raise < 0 ? FAILED : YES;
    int by_item = PySet_Contains(THE(by_item), func);
    if (by_item == 1 && call->batch_count == 1 && PyTuple_GetItem(args, 0) == call->batches[0])
        return attribute_is(call->batches[0], A__cached, Py_None);
    if (by_item != 0)
        return by_item < 0 ? FAILED : NO;
    PyObject *batches = list_of(call->batches, call->batch_count);
    PyObject *may = batches == NULL ? NULL : PyObject_CallFunctionObjArgs(THE(may_fail), func, args, batches, NULL);
    Py_XDECREF(batches);
    Py_XDECREF(may);
    return may == NULL ? FAILED : may == Py_False;
}

/* Replace plain tensors by what `View.replicate` returns; leaves that were adopted before are returned as they are. */
static int replicate(Call *call, PyObject *view)
{
    int records = -1;
    PyObject *adopted = NULL;
    for (int i = 0; i < call->plain_count; i++) {
        PyObject **input = &call->inputs[call->plain[i]];
        int needs = attribute_is(*input, A_requires_grad, Py_True);
        if (needs == YES && records < 0)
            records = returns(THE(is_grad_enabled), Py_True);
        if (needs == FAILED || (needs == YES && records == FAILED))
            goto failed;
        if (needs == NO || records == NO)
            continue;
        int known = attribute_is(*input, A_is_leaf, Py_True);
        if (known == YES) {
            PyObject *number = PyLong_FromVoidPtr(*input);
            if (adopted == NULL)
                adopted = GET(view, _adopted);
            known = number == NULL || adopted == NULL ? FAILED : PyDict_Contains(adopted, number);
            Py_XDECREF(number);
        }
        if (known == FAILED)
            goto failed;
        if (known == YES)
            continue;
        PyObject *replicated = PyObject_CallFunctionObjArgs(THE(replicate), view, *input, NULL);
        if (replicated == NULL)
            goto failed;
        Py_DECREF(*input);
        *input = replicated;
    }
    Py_XDECREF(adopted);
    return YES;
failed:
    Py_XDECREF(adopted);
    return FAILED;
}

/* The program for a call, borrowed; NULL without an exception if there is none, or if `dispatch` must make the call. */
static PyObject *program_of(Call *call, PyObject *func, PyObject *args, PyObject *view)
{
    PyObject *programs = NULL, *shares = NULL, *key = NULL, *program = NULL;
    if (is_ordinary(view) != YES || nothing_observes() != YES || raises_alike(call, func, args) != YES)
        return NULL;
    if ((shares = GET(view, shares)) == NULL || is_one_share(shares) != YES)
        goto done;
    if ((programs = GET(view, programs)) == NULL || (key = tuple_of(call->keys, call->key_count)) == NULL)
        goto done;
    program = PyDict_GetItemWithError(programs, key);
done:
    Py_XDECREF(shares);
    Py_XDECREF(programs);
    Py_XDECREF(key);
    return program;
}

static PyObject *by_dispatch(PyObject *func, PyObject *args, PyObject *kwargs)
{
    PyObject *named = kwargs == NULL ? PyDict_New() : ref(kwargs);
    PyObject *out = named == NULL ? NULL : PyObject_CallFunctionObjArgs(THE(dispatch), func, args, named, NULL);
    Py_XDECREF(named);
    return out;
}

/* Make an exception of a program that of one device. */
static void tell(PyObject *func, PyObject *args, PyObject *kwargs, PyObject *view)
{
    PyObject *kind, *error, *trace;
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return;
    PyErr_Fetch(&kind, &error, &trace);
    PyErr_NormalizeException(&kind, &error, &trace);
    if (trace != NULL)
        PyException_SetTraceback(error, trace);
    PyObject *named = kwargs == NULL ? PyDict_New() : ref(kwargs);
    if (named != NULL)
        Py_XDECREF(PyObject_CallFunctionObjArgs(THE(failed), error, func, args, named, view, NULL));
    Py_XDECREF(named);
    Py_XDECREF(kind);
    Py_XDECREF(error);
    Py_XDECREF(trace);
}

static int count_write(Call *call, PyObject *func, PyObject *kwargs)
{
    int inference = returns(THE(is_inference_mode), Py_True);
    if (inference != YES)
        return inference == FAILED ? FAILED : YES;
    PyObject *named = kwargs == NULL ? PyDict_New() : ref(kwargs), *batches = list_of(call->batches, call->batch_count);
    PyObject *done = named == NULL || batches == NULL
                         ? NULL
                         : PyObject_CallFunctionObjArgs(THE(count_write), func, named, batches, NULL);
    Py_XDECREF(named);
    Py_XDECREF(batches);
    Py_XDECREF(done);
    return done == NULL ? FAILED : YES;
}

/* Run a program. NULL without an exception: its result would have another shape. */
static PyObject *run(PyObject *program, Call *call, PyObject *func, PyObject *args, PyObject *kwargs, PyObject *view)
{
    PyObject *inputs, *batches, *out = NULL;
    if (replicate(call, view) != YES)
        return NULL;
    inputs = list_of(call->inputs, call->input_count);
    batches = list_of(call->batches, call->batch_count);
    if (inputs != NULL && batches != NULL)
        out = PyObject_CallFunctionObjArgs(program, inputs, batches, NULL);
    Py_XDECREF(inputs);
    Py_XDECREF(batches);
    if (out == NULL && PyErr_ExceptionMatches(THE(outdated)))
        PyErr_Clear();
    else if (out == NULL)
        tell(func, args, kwargs, view);
    else if (count_write(call, func, kwargs) != YES)
        Py_CLEAR(out);
    return out;
}

/* The view of a call's batches, a new reference; NULL without an exception if these have several. */
static PyObject *view_of(Call *call)
{
    PyObject *view = NULL;
    for (int i = 0; i < call->batch_count; i++) {
        PyObject *meta = GET(call->batches[i], _meta), *spec = meta == NULL ? NULL : GET(meta, spec);
        PyObject *mine = spec == NULL ? NULL : GET(spec, view);
        Py_XDECREF(meta);
        Py_XDECREF(spec);
        if (mine == NULL || (view != NULL && mine != view)) {
            Py_XDECREF(mine);
            Py_CLEAR(view);
            return NULL;
        }
        Py_XDECREF(view);
        view = mine;
    }
    return view;
}

/* Run the program of a call. NULL without an exception: it has none, or something about it is unusual. */
static PyObject *replayed(PyObject *func, PyObject *args, PyObject *kwargs)
{
    Call call;
    PyObject *view = NULL, *program = NULL, *out = NULL;
    if (describe(&call, func, args, kwargs) == YES && PyTuple_Size(args) > 0 && (view = view_of(&call)) != NULL)
        program = program_of(&call, func, args, view);
    PyErr_Clear(); /* of a description that failed: `dispatch` raises what is to be raised */
    if (program != NULL) {
        Py_INCREF(program);
        out = run(program, &call, func, args, kwargs, view);
        Py_DECREF(program);
    }
    Py_XDECREF(view);
    clear_call(&call);
    return out;
}

/* call(func, types, args=(), kwargs=None): `__torch_function__` of a batch. */
static PyObject *call(PyObject *self, PyObject *const *values, Py_ssize_t count, PyObject *named)
{
    static const char *const words[] = {"func", "types", "args", "kwargs"};
    PyObject *found[4] = {NULL, NULL, NULL, NULL}, *args, *out;
    Py_ssize_t more = named == NULL ? 0 : PyTuple_Size(named);
    for (Py_ssize_t i = 0; i < count && i < 4; i++)
        found[i] = values[i];
    for (Py_ssize_t i = 0; i < more; i++)
        for (int j = 0; j < 4; j++)
            if (PyUnicode_CompareWithASCIIString(PyTuple_GetItem(named, i), words[j]) == 0)
                found[j] = values[count + i];
    if (count > 4 || found[0] == NULL) {
        PyErr_SetString(PyExc_TypeError, "__torch_function__ takes func, types, args and kwargs");
        return NULL;
    }
    args = found[2] == NULL ? PyTuple_New(0) : PySequence_Tuple(found[2]);
    if (args == NULL)
        return NULL;
    PyObject *kwargs = found[3] == Py_None ? NULL : found[3];
    out = replayed(found[0], args, kwargs);
    if (out == NULL && !PyErr_Occurred())
        out = by_dispatch(found[0], args, kwargs);
    Py_DECREF(args);
    return out;
}

/* made(rows, meta): `_made` of replay.py, which makes what is not as the rule returned it. */
static PyObject *made(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    PyObject *rows = args[0], *meta = args[1], *shape, *local, *dtype = NULL, *batch = NULL;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "made takes rows and their Meta");
        return NULL;
    }
    shape = GET(rows, shape);
    local = GET(meta, local_shape);
    int alike = shape == NULL || local == NULL ? FAILED : PyObject_RichCompareBool(shape, local, Py_EQ);
    Py_XDECREF(shape);
    Py_XDECREF(local);
    if (alike == YES) {
        dtype = GET(meta, dtype);
        alike = dtype == NULL ? FAILED : attribute_is(rows, A_dtype, dtype);
    }
    if (alike == NO)
        batch = PyObject_CallFunctionObjArgs(THE(made), rows, meta, NULL);
    if (alike == YES && (shape = GET(meta, shape)) != NULL) {
        PyObject *device = GET(rows, device);
        PyObject *sizes = PyTuple_Pack(2, THE(batch), shape), *named = PyDict_New();
        if (device != NULL && sizes != NULL && named != NULL
            && PyDict_SetItem(named, attributes[A_dtype], dtype) == 0
            && PyDict_SetItem(named, attributes[A_device], device) == 0)
            batch = PyObject_Call(THE(make_wrapper), sizes, named);
        Py_XDECREF(device);
        Py_XDECREF(sizes);
        Py_XDECREF(named);
        Py_DECREF(shape);
        if (batch != NULL
            && (PyObject_SetAttr(batch, attributes[A__rows], rows) < 0
                || PyObject_SetAttr(batch, attributes[A__meta], meta) < 0))
            Py_CLEAR(batch);
    }
    Py_XDECREF(dtype);
    return batch;
}

/* described(func, args, kwargs): (key, inputs, plain, batches) of a call, as `DescribedCall` has them; None without. */
static PyObject *described(PyObject *self, PyObject *arguments)
{
    PyObject *func, *args, *kwargs, *out = NULL;
    Call call;
    if (!PyArg_ParseTuple(arguments, "OO!O!", &func, &PyTuple_Type, &args, &PyDict_Type, &kwargs))
        return NULL;
    int done = describe(&call, func, args, kwargs);
    if (done == NO)
        out = ref(Py_None);
    if (done == YES) {
        PyObject *plain = PyList_New(0);
        for (int i = 0; plain != NULL && i < call.plain_count; i++) {
            PyObject *place = PyLong_FromLong(call.plain[i]);
            if (place == NULL || PyList_Append(plain, place) < 0)
                Py_CLEAR(plain);
            Py_XDECREF(place);
        }
        if (plain != NULL)
            out = Py_BuildValue("(NNNN)", tuple_of(call.keys, call.key_count), list_of(call.inputs, call.input_count),
                                plain, list_of(call.batches, call.batch_count));
    }
    clear_call(&call);
    return out;
}

/* Methods of a batch that models call most. torch parses the arguments of a method before it asks for
   `__torch_function__`, for which it passes them on unchanged; these ask at once. Not among them: methods that change
   the arguments (`split`), and reflected ones, which would take the place of the method of a plain left operand. */
#define METHODS(X)                                                                                                     \
    X(view) X(reshape) X(transpose) X(permute) X(contiguous) X(flatten) X(squeeze) X(unsqueeze) X(expand) X(chunk)     \
    X(unbind) X(softmax) X(mean) X(sum) X(masked_fill) X(add) X(mul) X(__add__) X(__sub__) X(__mul__) X(__truediv__)   \
    X(__matmul__) X(__neg__) X(__getitem__)

enum {
#define X(name) M_##name,
    METHODS(X)
#undef X
        METHOD_COUNT
};
static PyObject *functions[METHOD_COUNT]; /* what torch passes to `__torch_function__` */
static PyObject *originals[METHOD_COUNT];

static PyObject *method(int which, PyObject *self, PyObject *const *values, Py_ssize_t count, PyObject *names_of)
{
    PyObject *out = NULL, *kwargs = NULL, *args = PyTuple_New(count + 1);
    Py_ssize_t more = names_of == NULL ? 0 : PyTuple_Size(names_of);
    if (args == NULL || (more > 0 && (kwargs = PyDict_New()) == NULL))
        goto done;
    PyTuple_SetItem(args, 0, ref(self));
    for (Py_ssize_t i = 0; i < count; i++)
        PyTuple_SetItem(args, i + 1, ref(values[i]));
    for (Py_ssize_t i = 0; i < more; i++)
        if (PyDict_SetItem(kwargs, PyTuple_GetItem(names_of, i), values[count + i]) < 0)
            goto done;
    if ((PyObject *)Py_TYPE(self) == THE(batch) && returns(THE(is_enabled), Py_True) == YES
        && returns(THE(modes_are_active), Py_False) == YES)
        out = replayed(functions[which], args, kwargs);
    if (out == NULL && !PyErr_Occurred())
        out = PyObject_Call(originals[which], args, kwargs);
done:
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    return out;
}

#define X(name)                                                                                                        \
    static PyObject *method_##name(PyObject *self, PyObject *const *values, Py_ssize_t count, PyObject *names_of)      \
    {                                                                                                                  \
        return method(M_##name, self, values, count, names_of);                                                        \
    }
METHODS(X)
#undef X

static PyMethodDef batch_methods[] = {
#define X(name) {#name, (PyCFunction)(void (*)(void))method_##name, METH_FASTCALL | METH_KEYWORDS, NULL},
    METHODS(X)
#undef X
};

/* methods_of(kind, function_of): descriptors of the methods, by name. function_of: name -> (original, function). */
static PyObject *methods_of(PyObject *self, PyObject *arguments)
{
    PyObject *kind, *function_of, *found = PyDict_New();
    if (found == NULL || !PyArg_ParseTuple(arguments, "O!O", &PyType_Type, &kind, &function_of))
        return NULL;
    for (int i = 0; i < METHOD_COUNT; i++) {
        PyObject *name = PyUnicode_FromString(batch_methods[i].ml_name), *descriptor = NULL;
        PyObject *both = name == NULL ? NULL : PyObject_CallFunctionObjArgs(function_of, name, NULL);
        Py_XDECREF(name);
        if (both == NULL || !PyArg_ParseTuple(both, "OO", &originals[i], &functions[i])
            || (descriptor = PyDescr_NewMethod((PyTypeObject *)kind, &batch_methods[i])) == NULL
            || PyDict_SetItemString(found, batch_methods[i].ml_name, descriptor) < 0)
            Py_CLEAR(found);
        else {
            Py_INCREF(originals[i]);
            Py_INCREF(functions[i]);
        }
        Py_XDECREF(both);
        Py_XDECREF(descriptor);
        if (found == NULL)
            return NULL;
    }
    return found;
}

/* YES if there is nothing in a container. */
static int is_empty(PyObject *object, int name)
{
    PyObject *found = PyObject_GetAttr(object, attributes[name]);
    Py_ssize_t size = found == NULL ? -1 : PyObject_Size(found);
    Py_XDECREF(found);
    return size < 0 ? FAILED : size == 0;
}

/* As `ModuleCalls._is_ordinary`, for a module that is called with a batch within another's call. */
static int is_ordinary_module(PyObject *calls, PyObject *module, PyObject *view)
{
    PyObject *here = GET(calls, _here), *kinds = NULL, *compiled = NULL;
    int found = here == NULL ? FAILED : attribute_is(here, A_around, Py_None);
    found = found == NO ? attribute_is(here, A_whole, Py_False) : found == YES ? NO : FAILED;
    Py_XDECREF(here);
    ADD(found);
    if ((kinds = GET(calls, _ordinary)) == NULL)
        return FAILED;
    found = PyDict_GetItemWithError(kinds, (PyObject *)Py_TYPE(module)) == Py_True;
    Py_DECREF(kinds);
    ADD(found);
    if ((compiled = GET(calls, _compiled)) == NULL)
        return FAILED;
    found = attribute_is(compiled, A_is_on_rows, Py_False);
    Py_DECREF(compiled);
    ADD(found);
    if (PyObject_Size(THE(module_hooks)) != 0)
        return NO;
    ADD(is_empty(view, A_recomputed));
    ADD(is_empty(module, A__backward_hooks));
    return attribute_is(module, A__compiled_call_impl, Py_None);
}

/* is_ordinary(calls, module, args): True if there is nothing to do for a module call; False: perhaps there is. */
static PyObject *is_ordinary_call(PyObject *self, PyObject *const *values, Py_ssize_t count)
{
    int found = NO;
    if (count == 3 && PyTuple_Size(values[2]) > 0
        && (PyObject *)Py_TYPE(PyTuple_GetItem(values[2], 0)) == THE(batch)) {
        PyObject *view = GET(values[0], view);
        found = view == NULL ? FAILED : is_ordinary_module(values[0], values[1], view);
        Py_XDECREF(view);
    }
    PyErr_Clear();
    return ref(found == YES ? Py_True : Py_False);
}

/* configure(**objects): set what the names stand for. */
static PyObject *configure(PyObject *self, PyObject *args, PyObject *named)
{
    for (int i = 0; i < COUNT; i++) {
        PyObject *object = named == NULL ? NULL : PyDict_GetItemString(named, names[i]);
        if (object == NULL) {
            PyErr_SetString(PyExc_TypeError, names[i]);
            return NULL;
        }
        Py_INCREF(object);
        Py_XDECREF(given[i]);
        given[i] = object;
    }
    return ref(Py_None);
}

static PyMethodDef methods[] = {
    {"call", (PyCFunction)(void (*)(void))call, METH_FASTCALL | METH_KEYWORDS,
     "call(func, types, args=(), kwargs=None): a torch function of a batch."},
    {"made", (PyCFunction)(void (*)(void))made, METH_FASTCALL, "made(rows, meta): a batch of rows."},
    {"described", described, METH_VARARGS, "described(func, args, kwargs): (key, inputs, plain, batches), or None."},
    {"methods_of", methods_of, METH_VARARGS, "methods_of(kind, function_of): descriptors of methods, by name."},
    {"is_ordinary", (PyCFunction)(void (*)(void))is_ordinary_call, METH_FASTCALL,
     "is_ordinary(calls, module, args): True if there is nothing to do for a module call."},
    {"configure", (PyCFunction)(void (*)(void))configure, METH_VARARGS | METH_KEYWORDS,
     "configure(**objects): set the objects of duoka and torch that this module uses."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "duoka.view.dispatch._replay",
                                    "Finds and runs recorded programs.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__replay(void)
{
    static const char *const words[] = {
#define X(name) #name,
        ATTRIBUTES(X)
#undef X
    };
    for (int i = 0; i < ATTRIBUTE_COUNT; i++) {
        attributes[i] = PyUnicode_InternFromString(words[i]);
        if (attributes[i] == NULL)
            return NULL;
    }
    PyObject *made_module = PyModule_Create(&module);
    if (made_module != NULL && PyModule_AddIntConstant(made_module, "VERSION", VERSION) < 0)
        Py_CLEAR(made_module);
    return made_module;
}
