/* The fast path of `dispatch` (dispatch.py): find the program that was recorded for a call, and run it.

`call` is BatchTensor's `__torch_function__`. It describes a call in *words* (pointers and numbers) that are equal for
two calls if and only if their keys (`DescribedCall` in replay.py) are, and looks for the program that `dispatch` has
run for such a call. A call that has none, or is unusual in any way, is made by `dispatch`, which decides everything.

Only the limited API is used, and of torch the functions that it exports to C for models compiled ahead of time, which
stay the same: one build serves every Python from 3.10 on, and every torch. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030a0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define VERSION 6 /* of what native.py relies on: a module that was built before a change is not used */
#define MOST_WORDS 256 /* of a call, and so on: a call with more is made by `dispatch` */
#define MOST_ARGUMENTS 32
#define MOST_INPUTS 32
#define MOST_DIMS 8
#define SLOTS 16384 /* of the table of programs, a power of 2; half of them are used */

/* What `configure` is given: objects of duoka and torch, by name. */
#define NAMES(X)                                                                                                       \
    X(batch) X(tensor) X(parameter) X(size) X(dtype) X(memory_format) X(getter) X(outdated) X(dispatch) X(made)        \
    X(failed) X(count_write) X(replicate) X(may_raise) X(may_fail) X(by_item) X(transform_level) X(forward_mode)       \
    X(count_dispatch_modes) X(may_write) X(is_grad_enabled) X(make_wrapper) X(zero) X(one)                     \
    X(modes_are_active) X(is_enabled) X(module_hooks) X(leaves) X(identity)

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
    X(_rows) X(_meta) X(_cached) X(_adopted) X(spec) X(view) X(shape) X(dtype) X(device) X(local_shape) X(aliased)     \
    X(copies) X(shares) X(count) X(exact) X(of_parameters) X(has_sharded) X(watch) X(requires_grad) X(is_leaf)         \
    X(start) X(stop) X(step) X(_here) X(ordinary) X(unusual) X(_compiled_call_impl) X(_fields) X(__dict__) X(forward)  \
    X(_parameters) X(_current_level) X(_forward_hooks) X(_forward_pre_hooks) X(_backward_hooks) X(_backward_pre_hooks)

enum {
#define X(name) A_##name,
    ATTRIBUTES(X)
#undef X
        ATTRIBUTE_COUNT
};
static PyObject *attributes[ATTRIBUTE_COUNT];
#define NAME(name) attributes[A_##name]
#define GET(object, name) PyObject_GetAttr(object, NAME(name))

/* Results of functions that may have nothing to return: */
enum { FAILED = -1, NO = 0, YES = 1 }; /* FAILED: an exception is set */

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

/* --- tensors */

/* Where a tensor has what torch's functions for C call its handle; found out by `configure`. */
static Py_ssize_t place_of_handle;
#define HANDLE(tensor) ((void *)((char *)(tensor) + place_of_handle))

/* An attribute of a batch itself, borrowed; NULL without an exception if it has none. */
static PyObject *own(PyObject *batch, int name)
{
    PyObject *dict = PyObject_GenericGetDict(batch, NULL);
    PyObject *found = dict == NULL ? NULL : PyDict_GetItemWithError(dict, attributes[name]);
    Py_XDECREF(dict);
    if (found == NULL)
        PyErr_Clear();
    return found;
}

/* Functions that torch exports to C; each returns 0 if it succeeds. */
#define SHIMS(X)                                                                                                       \
    X(get_dim, int64_t) X(get_sizes, int64_t *) X(get_strides, int64_t *) X(get_dtype, int32_t)                        \
    X(get_layout, int32_t) X(get_device_type, int32_t) X(get_device_index, int32_t)

#define X(name, type) static int32_t (*name)(void *, type *);
SHIMS(X)
#undef X

/* --- describing calls */

typedef struct {
    intptr_t words[MOST_WORDS];
    PyObject *args[MOST_ARGUMENTS]; /* all are borrowed; those by name are behind the others */
    PyObject *names[MOST_ARGUMENTS];
    PyObject *inputs[MOST_INPUTS];
    PyObject *batches[MOST_INPUTS];
    int plain[MOST_INPUTS], needs[MOST_INPUTS]; /* of plain tensors: place among the inputs, `requires_grad` */
    int word_count, arg_count, name_count, input_count, batch_count, plain_count;
} Call;

/* What comes before a number, or stands for an object. */
enum { OF_INT = 1, OF_TRUE, OF_FALSE, OF_FLOAT, OF_TENSOR, OF_TUPLE, OF_LIST, OF_DICT, OF_SLICE, OF_SAME };

static int add_word(Call *call, intptr_t word)
{
    if (call->word_count == MOST_WORDS)
        return NO;
    call->words[call->word_count++] = word;
    return YES;
}

static int add_words(Call *call, intptr_t one, intptr_t other)
{
    ADD(add_word(call, one));
    return add_word(call, other);
}

static int add_int(Call *call, PyObject *value)
{
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    return overflow || number != (intptr_t)number ? NO : add_words(call, OF_INT, (intptr_t)number);
}

static int add(Call *call, PyObject *value);

static int add_sequence(Call *call, PyObject *value, int kind)
{
    int is_list = PyList_Check(value);
    Py_ssize_t count = is_list ? PyList_Size(value) : PyTuple_Size(value);
    ADD(add_words(call, kind, count));
    for (Py_ssize_t i = 0; i < count; i++)
        ADD(add(call, is_list ? PyList_GetItem(value, i) : PyTuple_GetItem(value, i)));
    return YES;
}

static int add_dict(Call *call, PyObject *value)
{
    PyObject *name, *item;
    Py_ssize_t place = 0;
    ADD(add_words(call, OF_DICT, PyDict_Size(value)));
    while (PyDict_Next(value, &place, &name, &item)) {
        ADD(PyUnicode_CheckExact(name) ? add_word(call, (intptr_t)name) : NO);
        ADD(add(call, item));
    }
    return YES;
}

static int add_slice(Call *call, PyObject *value)
{
    static const int parts[] = {A_start, A_stop, A_step};
    ADD(add_word(call, OF_SLICE));
    for (int i = 0; i < 3; i++) {
        PyObject *part = PyObject_GetAttr(value, attributes[parts[i]]);
        int done = part == NULL ? FAILED : part == Py_None ? add_word(call, (intptr_t)part) : NO;
        if (part != NULL && PyLong_CheckExact(part))
            done = add_int(call, part);
        Py_XDECREF(part);
        ADD(done);
    }
    return YES;
}

/* The properties of a plain tensor that rules decide by. */
static int add_plain(Call *call, PyObject *value)
{
    void *handle = HANDLE(value);
    int64_t dims, *sizes, *strides;
    int32_t layout, dtype;
    if (get_layout(handle, &layout) != 0 || layout != 0 || get_dim(handle, &dims) != 0)
        return NO; /* a sparse tensor has no strides */
    if (get_sizes(handle, &sizes) != 0 || get_strides(handle, &strides) != 0 || get_dtype(handle, &dtype) != 0)
        return NO;
    int needs = attribute_is(value, A_requires_grad, Py_True);
    if (needs == FAILED)
        return FAILED;
    ADD(add_words(call, OF_TENSOR, (intptr_t)dims << 16 | (intptr_t)dtype << 1 | needs));
    for (int64_t i = 0; i < dims; i++)
        ADD(add_words(call, (intptr_t)sizes[i], (intptr_t)strides[i]));
    call->needs[call->plain_count] = needs;
    call->plain[call->plain_count++] = call->input_count;
    call->inputs[call->input_count++] = value;
    return YES;
}

/* Add an argument to words and inputs, as `DescribedCall._add`. NO: it has an unknown type. */
static int add(Call *call, PyObject *value)
{
    PyObject *kind = (PyObject *)Py_TYPE(value);
    if (call->input_count == MOST_INPUTS)
        return NO;
    if (kind == THE(batch)) {
        PyObject *rows = own(value, A__rows), *meta = own(value, A__meta);
        if (rows == NULL || meta == NULL)
            return NO;
        call->batches[call->batch_count++] = value;
        call->inputs[call->input_count++] = rows;
        return add_word(call, (intptr_t)meta);
    }
    if (kind == THE(parameter) || kind == THE(tensor))
        return add_plain(call, value);
    if (kind == (PyObject *)&PyLong_Type)
        return add_int(call, value);
    if (value == Py_None || kind == (PyObject *)&PyUnicode_Type || value == Py_Ellipsis || kind == THE(dtype)
        || kind == THE(memory_format))
        return add_word(call, (intptr_t)value);
    if (kind == (PyObject *)&PyBool_Type)
        return add_word(call, value == Py_True ? OF_TRUE : OF_FALSE);
    if (kind == (PyObject *)&PyFloat_Type) {
        double number = PyFloat_AsDouble(value);
        call->inputs[call->input_count++] = value;
        return add_words(call, OF_FLOAT, number == 0 ? 0 : number == 1 ? 1 : 2);
    }
    if (kind == (PyObject *)&PyTuple_Type || kind == THE(size))
        return add_sequence(call, value, OF_TUPLE);
    if (kind == (PyObject *)&PyList_Type)
        return add_sequence(call, value, OF_LIST);
    if (kind == (PyObject *)&PySlice_Type)
        return add_slice(call, value);
    return kind == (PyObject *)&PyDict_Type ? add_dict(call, value) : NO;
}

/* Note which inputs are the same object. */
static int add_repeated(Call *call)
{
    for (int i = 1; i < call->input_count; i++)
        for (int j = 0; j < i; j++)
            if (call->inputs[i] == call->inputs[j]) {
                ADD(add_word(call, OF_SAME));
                ADD(add_words(call, i, j));
                break;
            }
    return YES;
}

/* Describe a call whose arguments have been taken. NO: it has no words, or no batch. */
static int describe(Call *call, PyObject *func)
{
    call->word_count = call->input_count = call->batch_count = call->plain_count = 0;
    if ((PyObject *)Py_TYPE(func) == THE(getter) || call->arg_count == 0)
        return NO; /* torch makes a getter anew for each call */
    ADD(add_word(call, (intptr_t)func));
    for (int i = 0; i < call->arg_count; i++)
        ADD(add(call, call->args[i]));
    if (call->name_count > 0)
        ADD(add_words(call, OF_DICT, call->name_count));
    for (int i = 0; i < call->name_count; i++) {
        ADD(add_word(call, (intptr_t)call->names[i]));
        ADD(add(call, call->args[call->arg_count + i]));
    }
    ADD(add_repeated(call));
    return call->batch_count > 0;
}

/* Take the arguments of a call from a tuple and a dict, which may be NULL. */
static int take(Call *call, PyObject *args, PyObject *kwargs)
{
    Py_ssize_t count = PyTuple_Size(args), more = kwargs == NULL ? 0 : PyDict_Size(kwargs), place = 0;
    if (count < 0 || count + more > MOST_ARGUMENTS)
        return NO;
    for (Py_ssize_t i = 0; i < count; i++)
        call->args[i] = PyTuple_GetItem(args, i);
    for (Py_ssize_t i = 0; i < more && PyDict_Next(kwargs, &place, &call->names[i], &call->args[count + i]); i++)
        if (!PyUnicode_CheckExact(call->names[i]))
            return NO;
    call->arg_count = (int)count;
    call->name_count = (int)more;
    return YES;
}

static PyObject *tuple_of(PyObject *const *items, int count)
{
    PyObject *tuple = PyTuple_New(count);
    for (int i = 0; tuple != NULL && i < count; i++)
        PyTuple_SetItem(tuple, i, ref(items[i]));
    return tuple;
}

static PyObject *list_of(PyObject *const *items, int count)
{
    PyObject *list = PyList_New(count);
    for (int i = 0; list != NULL && i < count; i++)
        PyList_SetItem(list, i, ref(items[i]));
    return list;
}

static PyObject *dict_of(PyObject *const *keys, PyObject *const *items, int count)
{
    PyObject *dict = PyDict_New();
    for (int i = 0; dict != NULL && i < count; i++)
        if (PyDict_SetItem(dict, keys[i], items[i]) < 0)
            Py_CLEAR(dict);
    return dict;
}

/* --- making batches */

/* The properties of a batch, and the arguments for its wrapper. kind: dtype, type and index of the device. */
typedef struct {
    PyObject *meta, *positional, *named; /* owned */
    int64_t dims, sizes[MOST_DIMS];
    int32_t kind[3], is_default; /* is_default: as long as that of a new tensor is the same */
} Made;

static void clear_made(Made *made)
{
    Py_CLEAR(made->meta);
    Py_CLEAR(made->positional);
    Py_CLEAR(made->named);
}

static int set_made(Made *made, PyObject *meta)
{
    PyObject *local = GET(meta, local_shape), *shape = GET(meta, shape);
    made->meta = ref(meta);
    made->dims = local == NULL ? MOST_DIMS + 1 : PyTuple_Size(local);
    for (int64_t i = 0; i < made->dims && made->dims <= MOST_DIMS; i++)
        made->sizes[i] = PyLong_AsLongLong(PyTuple_GetItem(local, (Py_ssize_t)i));
    if (shape != NULL)
        made->positional = PyTuple_Pack(2, THE(batch), shape);
    Py_XDECREF(local);
    Py_XDECREF(shape);
    return made->positional != NULL && made->dims <= MOST_DIMS && !PyErr_Occurred() ? YES : NO;
}

static int kind_of(PyObject *tensor, int32_t *kind)
{
    void *handle = HANDLE(tensor);
    return get_dtype(handle, &kind[0]) == 0 && get_device_type(handle, &kind[1]) == 0
           && get_device_index(handle, &kind[2]) == 0;
}

/* YES if rows have the properties in `made`, where the last ones from another device are put. */
static int fits(Made *made, PyObject *rows)
{
    int64_t dims, *sizes;
    int32_t kind[3];
    if ((PyObject *)Py_TYPE(rows) != THE(tensor) || get_dim(HANDLE(rows), &dims) != 0 || dims != made->dims
        || get_sizes(HANDLE(rows), &sizes) != 0 || memcmp(sizes, made->sizes, (size_t)dims * sizeof(int64_t)) != 0
        || !kind_of(rows, kind))
        return NO;
    if (made->named != NULL && memcmp(kind, made->kind, sizeof(kind)) == 0)
        return YES;
    PyObject *keys[] = {NAME(dtype), NAME(device)}, *values[] = {GET(made->meta, dtype), GET(rows, device)};
    int alike = values[0] == NULL || values[1] == NULL ? FAILED : attribute_is(rows, A_dtype, values[0]);
    if (alike == YES) {
        Py_XDECREF(made->named);
        made->named = dict_of(keys, values, 2);
        memcpy(made->kind, kind, sizeof(kind));
        made->is_default = YES;
        alike = made->named == NULL ? FAILED : YES;
    }
    Py_XDECREF(values[0]);
    Py_XDECREF(values[1]);
    return alike;
}

/* Make a wrapper. torch takes as long to parse a dtype and a device as for all the rest, so these are left out as long
   as they are torch's defaults. */
static PyObject *make_wrapper(Made *made)
{
    int32_t kind[3];
    PyObject *batch = PyObject_Call(THE(make_wrapper), made->positional, made->is_default ? NULL : made->named);
    if (batch == NULL || !made->is_default || (kind_of(batch, kind) && memcmp(kind, made->kind, sizeof(kind)) == 0))
        return batch;
    made->is_default = NO;
    Py_DECREF(batch);
    return make_wrapper(made);
}

/* Make a batch of rows, as `remake` of replay.py, which makes what is not as the rule returned it. */
static PyObject *make(Made *made, PyObject *rows)
{
    int alike = fits(made, rows);
    if (alike != YES)
        return alike == FAILED ? NULL : PyObject_CallFunctionObjArgs(THE(made), rows, made->meta, NULL);
    PyObject *batch = make_wrapper(made), *dict = batch == NULL ? NULL : PyObject_GenericGetDict(batch, NULL);
    if (dict == NULL || PyDict_SetItem(dict, NAME(_rows), rows) < 0 || PyDict_SetItem(dict, NAME(_meta), made->meta) < 0)
        Py_CLEAR(batch);
    Py_XDECREF(dict);
    return batch;
}

/* --- programs */

/* What an expression of a program is (replay.py): */
enum { INPUT, BATCH, OUTPUT, ITEM, CONSTANT, SEQUENCE, DICT, MADE, CALL };

typedef struct Expression {
    int kind, number, count, name_count;
    PyObject *object, *names; /* owned, as are the parts */
    struct Expression *parts;
    Made *made;
} Expression;

static void clear_expression(Expression *at)
{
    for (int i = 0; i < at->count; i++)
        clear_expression(&at->parts[i]);
    if (at->made != NULL)
        clear_made(at->made);
    free(at->made);
    free(at->parts);
    Py_CLEAR(at->object);
    Py_CLEAR(at->names);
}

/* Read an expression: (kind, object, parts), of a call also the names of the last parts. */
static int read_expression(Expression *at, PyObject *from)
{
    PyObject *parts, *names = NULL;
    if (!PyArg_ParseTuple(from, "iOO!|O!", &at->kind, &at->object, &PyTuple_Type, &parts, &PyTuple_Type, &names)) {
        at->object = NULL;
        return FAILED;
    }
    Py_INCREF(at->object);
    if (names != NULL) {
        at->names = ref(names);
        at->name_count = (int)PyTuple_Size(names);
    }
    if (at->kind == SEQUENCE)
        at->number = PyObject_HasAttr(at->object, NAME(_fields)); /* a named tuple */
    if (at->kind <= OUTPUT || at->kind == ITEM)
        at->number = (int)PyLong_AsLong(at->object);
    if (at->kind == MADE)
        ADD((at->made = calloc(1, sizeof(Made))) == NULL ? NO : set_made(at->made, at->object));
    Py_ssize_t count = PyTuple_Size(parts);
    if (count > MOST_ARGUMENTS || (count > 0 && (at->parts = calloc((size_t)count, sizeof(Expression))) == NULL))
        return NO;
    for (Py_ssize_t i = 0; i < count; i++) {
        at->count++;
        ADD(read_expression(&at->parts[i], PyTuple_GetItem(parts, i)));
    }
    return PyErr_Occurred() ? FAILED : YES;
}

typedef struct {
    PyObject *const *inputs, *const *batches, *outputs[MOST_ARGUMENTS];
} Run;

static PyObject *evaluate(const Expression *at, const Run *run);

/* The values of `count` parts from `first` on, as a tuple. */
static PyObject *tuple_of_parts(const Expression *at, const Run *run, int first, int count)
{
    PyObject *tuple = PyTuple_New(count), *value;
    for (int i = 0; tuple != NULL && i < count; i++) {
        const Expression *part = &at->parts[first + i];
        value = part->kind == INPUT ? ref(run->inputs[part->number]) : evaluate(part, run);
        if (value == NULL)
            Py_CLEAR(tuple);
        else
            PyTuple_SetItem(tuple, i, value);
    }
    return tuple;
}

static PyObject *dict_of_parts(const Expression *at, const Run *run, PyObject *names, int first)
{
    PyObject *dict = PyDict_New(), *value;
    for (int i = first; dict != NULL && i < at->count; i++) {
        value = evaluate(&at->parts[i], run);
        if (value == NULL || PyDict_SetItem(dict, PyTuple_GetItem(names, i - first), value) < 0)
            Py_CLEAR(dict);
        Py_XDECREF(value);
    }
    return dict;
}

static PyObject *call_with_parts(const Expression *at, const Run *run)
{
    int positional = at->count - at->name_count;
    PyObject *args = tuple_of_parts(at, run, 0, positional), *kwargs = NULL, *out = NULL;
    if (args != NULL && (at->name_count == 0 || (kwargs = dict_of_parts(at, run, at->names, positional)) != NULL))
        out = PyObject_Call(at->object, args, kwargs);
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    return out;
}

static PyObject *sequence_of_parts(const Expression *at, const Run *run)
{
    PyObject *tuple = tuple_of_parts(at, run, 0, at->count), *list, *out;
    if (tuple == NULL || at->object == (PyObject *)&PyTuple_Type)
        return tuple;
    if (at->number)
        out = PyObject_Call(at->object, tuple, NULL);
    else if ((list = PySequence_List(tuple)) == NULL || at->object == (PyObject *)&PyList_Type)
        out = list;
    else {
        out = PyObject_CallFunctionObjArgs(at->object, list, NULL);
        Py_DECREF(list);
    }
    Py_DECREF(tuple);
    return out;
}

/* The value of an expression. */
static PyObject *evaluate(const Expression *at, const Run *run)
{
    PyObject *part, *out;
    switch (at->kind) {
    case INPUT:
        return ref(run->inputs[at->number]);
    case BATCH:
        return ref(run->batches[at->number]);
    case OUTPUT:
        return ref(run->outputs[at->number]);
    case CONSTANT:
        return ref(at->object);
    case SEQUENCE:
        return sequence_of_parts(at, run);
    case DICT:
        return dict_of_parts(at, run, at->object, 0);
    case CALL:
        return call_with_parts(at, run);
    }
    if ((part = evaluate(&at->parts[0], run)) == NULL)
        return NULL;
    out = at->kind == ITEM ? PySequence_GetItem(part, at->number) : make(at->made, part);
    Py_DECREF(part);
    return out;
}

/* A function that repeats recorded calls. The parts of `all` are these calls, and the expression for the result. */
typedef struct {
    PyObject_HEAD
    Expression all;
} Program;

static PyObject *program_type;

/* The result of a program with these inputs and batches. */
static PyObject *result_of(const Program *program, PyObject *const *inputs, PyObject *const *batches)
{
    Run run = {inputs, batches, {NULL}};
    PyObject *out;
    int done = 0;
    while ((out = evaluate(&program->all.parts[done], &run)) != NULL && done < program->all.count - 1)
        run.outputs[done++] = out;
    while (done > 0)
        Py_DECREF(run.outputs[--done]);
    return out;
}

/* program(inputs, batches), of lists. */
static PyObject *call_program(PyObject *self, PyObject *lists, PyObject *named)
{
    PyObject *of[2], *items[2][MOST_INPUTS];
    if (!PyArg_ParseTuple(lists, "O!O!", &PyList_Type, &of[0], &PyList_Type, &of[1]))
        return NULL;
    for (int i = 0; i < 2; i++)
        for (Py_ssize_t j = 0; j < PyList_Size(of[i]) && j < MOST_INPUTS; j++)
            items[i][j] = PyList_GetItem(of[i], j);
    return result_of((Program *)self, items[0], items[1]);
}

static int visit_expression(const Expression *at, visitproc visit, void *arg)
{
    Py_VISIT(at->object);
    Py_VISIT(at->names);
    if (at->made != NULL) {
        Py_VISIT(at->made->meta);
        Py_VISIT(at->made->positional);
        Py_VISIT(at->made->named);
    }
    for (int i = 0; i < at->count; i++) {
        int stop = visit_expression(&at->parts[i], visit, arg);
        if (stop)
            return stop;
    }
    return 0;
}

static int visit_program(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    return visit_expression(&((Program *)self)->all, visit, arg);
}

static void free_program(PyObject *self)
{
    PyObject *type = (PyObject *)Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear_expression(&((Program *)self)->all);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static PyType_Slot program_slots[] = {
    {Py_tp_call, call_program}, {Py_tp_traverse, visit_program}, {Py_tp_dealloc, free_program}, {0, NULL}};
static PyType_Spec program_spec = {"duoka.view.dispatch._replay.Program", sizeof(Program), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, program_slots};

/* program(all, input_count): a function that repeats recorded calls; None if it has too many parts. */
static PyObject *program(PyObject *self, PyObject *arguments)
{
    PyObject *all;
    int input_count;
    if (!PyArg_ParseTuple(arguments, "O!i", &PyTuple_Type, &all, &input_count))
        return NULL;
    if (input_count > MOST_INPUTS)
        return ref(Py_None);
    Program *made = PyObject_GC_New(Program, (PyTypeObject *)program_type);
    if (made == NULL)
        return NULL;
    memset(&made->all, 0, sizeof(Expression));
    int done = read_expression(&made->all, all);
    PyObject_GC_Track(made);
    if (done == YES)
        return (PyObject *)made;
    Py_DECREF(made);
    return PyErr_Occurred() ? NULL : ref(Py_None);
}

/* --- the table of programs */

/* A call that has a program. */
typedef struct {
    uint64_t hash;
    intptr_t *words; /* what they point to is kept alive by `key` */
    PyObject *key, *function, *view, *of_view; /* owned; of_view: the attributes of the view */
    const Program *program; /* `function`, if it is one in C */
    int word_count, users, may_raise, by_item, may_write;
} Entry;

static Entry *table[SLOTS];
static int used;

static void leave(Entry *entry)
{
    if (--entry->users > 0)
        return;
    Py_XDECREF(entry->key);
    Py_XDECREF(entry->function);
    Py_XDECREF(entry->view);
    Py_XDECREF(entry->of_view);
    free(entry->words);
    free(entry);
}

static void forget_all(void)
{
    for (int i = 0; i < SLOTS; i++) {
        Entry *entry = table[i];
        table[i] = NULL;
        if (entry != NULL)
            leave(entry);
    }
    used = 0;
}

static uint64_t hash_of(const Call *call)
{
    uint64_t hash = 14695981039346656037u;
    for (int i = 0; i < call->word_count; i++) {
        hash = (hash ^ (uint64_t)call->words[i]) * 1099511628211u;
        hash ^= hash >> 29;
    }
    return hash;
}

/* The slot of a call's program, or a free one. */
static Entry **slot_of(const Call *call, uint64_t hash)
{
    size_t size = (size_t)call->word_count * sizeof(intptr_t);
    for (size_t i = hash & (SLOTS - 1);; i = (i + 1) & (SLOTS - 1)) {
        Entry *entry = table[i];
        if (entry == NULL
            || (entry->hash == hash && entry->word_count == call->word_count
                && memcmp(entry->words, call->words, size) == 0))
            return &table[i];
    }
}

/* The view of a call's batches, a new reference; NULL without an exception if these have several. */
static PyObject *view_of(Call *call)
{
    PyObject *view = NULL;
    for (int i = 0; i < call->batch_count; i++) {
        PyObject *spec = GET(own(call->batches[i], A__meta), spec), *mine = spec == NULL ? NULL : GET(spec, view);
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

/* YES if all shares but one are other processes', and gradients are those of the rows. */
static int is_one_share(PyObject *view)
{
    PyObject *shares = GET(view, shares), *count = shares == NULL ? NULL : GET(shares, count);
    int exact = shares == NULL ? FAILED : attribute_is(shares, A_exact, Py_True);
    int alone = count == NULL || exact == FAILED ? FAILED : PyObject_RichCompareBool(count, THE(one), Py_EQ);
    Py_XDECREF(shares);
    Py_XDECREF(count);
    return alone == YES ? !exact : alone;
}

/* Whether a set contains an object, which a call can be looked up by only if it has a hash. */
static int contains(PyObject *set, PyObject *object)
{
    int found = PySet_Contains(set, object);
    PyErr_Clear();
    return found != 0;
}

/* keep(func, args, kwargs, key, function): find a program from now on for such calls, which `dispatch` has just run. */
static PyObject *keep(PyObject *self, PyObject *const *values, Py_ssize_t count)
{
    Call call;
    PyObject *view = NULL, *writes;
    if (count != 5 || take(&call, values[1], values[2]) != YES || describe(&call, values[0]) != YES
        || (view = view_of(&call)) == NULL || attribute_is(view, A_watch, Py_None) != YES || is_one_share(view) != YES)
        goto done;
    if (2 * used >= SLOTS)
        forget_all();
    uint64_t hash = hash_of(&call);
    Entry **slot = slot_of(&call, hash), *entry = *slot == NULL ? calloc(1, sizeof(Entry)) : NULL;
    size_t size = (size_t)call.word_count * sizeof(intptr_t);
    if (entry == NULL || (entry->words = malloc(size)) == NULL) {
        free(entry);
        goto done;
    }
    memcpy(entry->words, call.words, size);
    entry->word_count = call.word_count;
    entry->hash = hash;
    entry->users = 1;
    entry->key = ref(values[3]);
    entry->function = ref(values[4]);
    if ((PyObject *)Py_TYPE(values[4]) == program_type)
        entry->program = (Program *)values[4];
    entry->may_raise = contains(THE(may_raise), values[0]);
    entry->by_item = contains(THE(by_item), values[0]);
    writes = PyObject_CallFunctionObjArgs(THE(may_write), values[0], values[2], NULL);
    entry->may_write = writes != Py_False;
    Py_XDECREF(writes);
    entry->of_view = GET(view, __dict__);
    entry->view = view;
    view = NULL;
    if (entry->of_view == NULL)
        leave(entry);
    else {
        *slot = entry;
        used++;
    }
done:
    Py_XDECREF(view);
    PyErr_Clear();
    return ref(Py_None);
}

/* --- running programs */

/* YES if no transform and no dispatch mode sees operators; they may be allowed, which `dispatch` decides. */
static int nothing_observes(void)
{
    ADD(returns(THE(transform_level), Py_None));
    ADD(returns(THE(count_dispatch_modes), THE(zero)));
    PyObject *level = PyDict_GetItemWithError(THE(forward_mode), NAME(_current_level)); /* -1: none */
    return level != NULL && PyLong_AsLong(level) < 0 ? YES : NO;
}

#define OF_VIEW(entry, name) PyDict_GetItemWithError((entry)->of_view, NAME(name))

/* YES if the view of a call's batches asks for nothing but the program. */
static int is_ordinary(Entry *entry)
{
    if (OF_VIEW(entry, of_parameters) != Py_False || OF_VIEW(entry, has_sharded) != Py_False
        || OF_VIEW(entry, device) != Py_None || OF_VIEW(entry, watch) != Py_None)
        return NO;
    PyObject *aliased = OF_VIEW(entry, aliased), *dict = aliased == NULL ? NULL : PyObject_GenericGetDict(aliased, NULL);
    PyObject *copies = dict == NULL ? NULL : PyDict_GetItemWithError(dict, NAME(copies));
    Py_XDECREF(dict);
    return copies == NULL ? FAILED : PyObject_Size(copies) == 0;
}

/* YES if a function raises no error for the values of single rows, which the ranks would have to tell each other. */
static int raises_alike(Entry *entry, Call *call, PyObject *func)
{
    if (!entry->may_raise)
        return YES;
    if (entry->by_item) {
        if (call->batch_count != 1 || call->args[0] != call->batches[0])
            return NO;
        int uncached = attribute_is(call->batches[0], A__cached, Py_None);
        if (uncached != YES || call->plain_count == 0)
            return uncached;
    }
    PyObject *args = tuple_of(call->args, call->arg_count), *batches = list_of(call->batches, call->batch_count);
    PyObject *may = args == NULL || batches == NULL
                        ? NULL
                        : PyObject_CallFunctionObjArgs(THE(may_fail), func, args, batches, NULL);
    Py_XDECREF(args);
    Py_XDECREF(batches);
    Py_XDECREF(may);
    return may == NULL ? FAILED : may == Py_False;
}

/* Replace plain tensors by what `View.replicate` returns; leaves that were adopted before are returned as they are.
   What it returns is put into `made` (a list), which keeps it alive. */
static int replicate(Call *call, Entry *entry, PyObject **made)
{
    int records = -1;
    for (int i = 0; i < call->plain_count; i++) {
        PyObject **input = &call->inputs[call->plain[i]];
        if (!call->needs[i])
            continue;
        if (records < 0 && (records = returns(THE(is_grad_enabled), Py_True)) == FAILED)
            return FAILED;
        if (records == NO)
            break;
        int known = attribute_is(*input, A_is_leaf, Py_True);
        if (known == YES) {
            PyObject *number = PyLong_FromVoidPtr(*input), *adopted = OF_VIEW(entry, _adopted);
            known = number == NULL || adopted == NULL ? FAILED : PyDict_Contains(adopted, number);
            Py_XDECREF(number);
        }
        if (known == FAILED)
            return FAILED;
        if (known == YES)
            continue;
        PyObject *replicated = PyObject_CallFunctionObjArgs(THE(replicate), entry->view, *input, NULL);
        if (replicated != NULL && *made == NULL)
            *made = PyList_New(0);
        int kept = replicated == NULL || *made == NULL ? -1 : PyList_Append(*made, replicated);
        Py_XDECREF(replicated);
        if (kept < 0)
            return FAILED;
        *input = replicated;
    }
    return YES;
}

/* The arguments of a call as a tuple and a dict. */
static int unpack(Call *call, PyObject **args, PyObject **kwargs)
{
    *args = tuple_of(call->args, call->arg_count);
    *kwargs = dict_of(call->names, &call->args[call->arg_count], call->name_count);
    return *args != NULL && *kwargs != NULL ? YES : FAILED;
}

static PyObject *by_dispatch(Call *call, PyObject *func)
{
    PyObject *args, *kwargs, *out = NULL;
    if (unpack(call, &args, &kwargs) == YES)
        out = PyObject_CallFunctionObjArgs(THE(dispatch), func, args, kwargs, NULL);
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    return out;
}

/* Make an exception of a program that of one device. */
static void tell(Call *call, PyObject *func, PyObject *view)
{
    PyObject *kind, *error, *trace, *args = NULL, *kwargs = NULL;
    PyErr_Fetch(&kind, &error, &trace);
    PyErr_NormalizeException(&kind, &error, &trace);
    if (trace != NULL)
        PyException_SetTraceback(error, trace);
    if (unpack(call, &args, &kwargs) == YES)
        Py_XDECREF(PyObject_CallFunctionObjArgs(THE(failed), error, func, args, kwargs, view, NULL));
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    Py_XDECREF(kind);
    Py_XDECREF(error);
    Py_XDECREF(trace);
}

/* Count a write, as `count_write` of dispatch.py does. */
static int count_write(Call *call, PyObject *func)
{
    PyObject *args, *kwargs, *batches = list_of(call->batches, call->batch_count), *done = NULL;
    if (unpack(call, &args, &kwargs) == YES && batches != NULL)
        done = PyObject_CallFunctionObjArgs(THE(count_write), func, kwargs, batches, NULL);
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    Py_XDECREF(batches);
    Py_XDECREF(done);
    return done == NULL ? FAILED : YES;
}

/* Call a program that is a function in Python. */
static PyObject *run_function(Entry *entry, Call *call)
{
    PyObject *inputs = list_of(call->inputs, call->input_count), *batches = list_of(call->batches, call->batch_count);
    PyObject *out = NULL;
    if (inputs != NULL && batches != NULL)
        out = PyObject_CallFunctionObjArgs(entry->function, inputs, batches, NULL);
    Py_XDECREF(inputs);
    Py_XDECREF(batches);
    return out;
}

/* Run a program. NULL without an exception: its result would have another shape. */
static PyObject *run(Entry *entry, Call *call, PyObject *func)
{
    PyObject *out = NULL, *made = NULL;
    if (replicate(call, entry, &made) == YES) {
        out = entry->program == NULL ? run_function(entry, call)
                                     : result_of(entry->program, call->inputs, call->batches);
        if (out == NULL && PyErr_ExceptionMatches(THE(outdated)))
            PyErr_Clear();
        else if (out == NULL && PyErr_ExceptionMatches(PyExc_Exception))
            tell(call, func, entry->view);
        else if (out != NULL && entry->may_write && count_write(call, func) != YES)
            Py_CLEAR(out);
    }
    Py_XDECREF(made);
    return out;
}

/* Run the program of a call whose arguments have been taken. NULL without an exception: it has none, or something about
   it is unusual; `described` tells whether the call has words. */
static PyObject *replayed(Call *call, PyObject *func, int *described)
{
    PyObject *out = NULL;
    int known = *described = describe(call, func);
    Entry *entry = known == YES ? *slot_of(call, hash_of(call)) : NULL;
    if (entry != NULL) {
        entry->users++;
        known = is_ordinary(entry);
        if (known == YES)
            known = nothing_observes();
        if (known == YES)
            known = raises_alike(entry, call, func);
        if (known == YES)
            out = run(entry, call, func);
        else
            PyErr_Clear(); /* `dispatch` raises what is to be raised */
        leave(entry);
    } else
        PyErr_Clear();
    return out;
}

/* call(func, types, args=(), kwargs=None): `__torch_function__` of a batch. */
static PyObject *call(PyObject *self, PyObject *const *values, Py_ssize_t count, PyObject *named)
{
    static const char *const words[] = {"func", "types", "args", "kwargs"};
    PyObject *found[4] = {NULL, NULL, NULL, NULL}, *args, *out = NULL;
    Py_ssize_t more = named == NULL ? 0 : PyTuple_Size(named);
    Call call;
    int described;
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
    PyObject *kwargs = found[3] == NULL || found[3] == Py_None ? NULL : found[3];
    if (take(&call, args, kwargs) == YES)
        out = replayed(&call, found[0], &described);
    if (out == NULL && !PyErr_Occurred()) {
        PyObject *all = kwargs == NULL ? PyDict_New() : ref(kwargs);
        if (all != NULL)
            out = PyObject_CallFunctionObjArgs(THE(dispatch), found[0], args, all, NULL);
        Py_XDECREF(all);
    }
    Py_DECREF(args);
    return out;
}

/* made(rows, meta): `remake` of replay.py. */
static PyObject *made(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Made made = {0};
    PyObject *batch = NULL;
    if (count != 2)
        PyErr_SetString(PyExc_TypeError, "made takes rows and their Meta");
    else if (set_made(&made, args[1]) == YES)
        batch = make(&made, args[0]);
    else if (!PyErr_Occurred())
        batch = PyObject_CallFunctionObjArgs(THE(made), args[0], args[1], NULL);
    clear_made(&made);
    return batch;
}

/* described(func, args, kwargs): the words of a call, the inputs, and the indices of plain tensors; None without. */
static PyObject *described(PyObject *self, PyObject *arguments)
{
    PyObject *func, *args, *kwargs;
    Call call;
    if (!PyArg_ParseTuple(arguments, "OO!O!", &func, &PyTuple_Type, &args, &PyDict_Type, &kwargs))
        return NULL;
    if (take(&call, args, kwargs) != YES || describe(&call, func) != YES) {
        PyErr_Clear();
        return ref(Py_None);
    }
    return Py_BuildValue("(y#N)", (char *)call.words, (Py_ssize_t)(call.word_count * sizeof(intptr_t)),
                         list_of(call.inputs, call.input_count));
}

/* forget(): drop all programs. */
static PyObject *forget(PyObject *self, PyObject *nothing)
{
    forget_all();
    return ref(Py_None);
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

/* YES if torch would call `__torch_function__` of batches, and of nothing else. */
static int is_asked(void)
{
    ADD(returns(THE(is_enabled), Py_True));
    return returns(THE(modes_are_active), Py_False);
}

static PyObject *method(int which, PyObject *self, PyObject *const *values, Py_ssize_t count, PyObject *names_of)
{
    PyObject *out = NULL, *args, *kwargs;
    Py_ssize_t more = names_of == NULL ? 0 : PyTuple_Size(names_of);
    Call call;
    int described;
    if (count + more >= MOST_ARGUMENTS) {
        PyErr_SetString(PyExc_TypeError, "too many arguments");
        return NULL;
    }
    call.args[0] = self;
    for (Py_ssize_t i = 0; i < count + more; i++)
        call.args[i + 1] = values[i];
    for (Py_ssize_t i = 0; i < more; i++)
        call.names[i] = PyTuple_GetItem(names_of, i);
    call.arg_count = (int)count + 1;
    call.name_count = (int)more;
    if ((PyObject *)Py_TYPE(self) == THE(batch) && is_asked() == YES)
        out = replayed(&call, functions[which], &described);
    if (out == NULL && !PyErr_Occurred()) {
        if (unpack(&call, &args, &kwargs) == YES)
            out = PyObject_Call(originals[which], args, kwargs);
        Py_XDECREF(args);
        Py_XDECREF(kwargs);
    }
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

/* --- modules */

#define OF(dict, name) PyDict_GetItemWithError(dict, NAME(name))

/* YES if a dict has nothing in an entry, or no such entry. */
static int is_empty(PyObject *dict, int name)
{
    PyObject *found = PyDict_GetItemWithError(dict, attributes[name]);
    if (found == NULL || found == Py_None)
        return PyErr_Occurred() ? FAILED : YES;
    Py_ssize_t size = PyObject_Size(found);
    return size < 0 ? FAILED : size == 0;
}

/* As `ModuleCalls._in_python` decides, for a module that is called with a batch. */
static int is_ordinary_module(PyObject *calls, PyObject *module, PyObject *of_module)
{
    PyObject *of_calls = PyObject_GenericGetDict(calls, NULL), *here = of_calls == NULL ? NULL : OF(of_calls, _here);
    PyObject *ordinary = here == NULL ? NULL : GET(here, ordinary);
    Py_XDECREF(of_calls);
    if (ordinary == NULL)
        return FAILED;
    int found = PyDict_GetItemWithError(ordinary, (PyObject *)Py_TYPE(module)) == Py_True;
    Py_DECREF(ordinary);
    ADD(found);
    ADD(is_empty(of_module, A__backward_hooks));
    ADD(PyDict_Size(PyTuple_GetItem(THE(module_hooks), 0)) == 0);
    PyObject *implementation = OF(of_module, _compiled_call_impl);
    return implementation == NULL || implementation == Py_None;
}

/* An attribute of a module, borrowed: among its parameters if it has not this attribute itself. */
static PyObject *attribute_of(PyObject *of_module, PyObject *name)
{
    PyObject *found = PyDict_GetItemWithError(of_module, name);
    PyObject *parameters = found == NULL ? OF(of_module, _parameters) : NULL;
    return parameters == NULL ? found : PyDict_GetItemWithError(parameters, name);
}

/* The result of an ordinary module of torch's whose `forward` calls one function with its attributes. NULL without an
   exception: it is no such module, or it has hooks, or torch would call something else. */
static PyObject *leaf(PyObject *module, PyObject *of_module, PyObject *batch)
{
    static const int hooks[] = {A__forward_hooks, A__forward_pre_hooks, A__backward_pre_hooks};
    PyObject *kind = (PyObject *)Py_TYPE(module), *known = PyDict_GetItemWithError(THE(leaves), kind), *found, *out;
    Call call;
    int described;
    if (known == NULL || OF(of_module, forward) != NULL)
        return NULL;
    for (int i = 0; i < 3; i++)
        if (is_empty(of_module, hooks[i]) != YES)
            return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_Size(THE(module_hooks)); i++)
        if (PyDict_Size(PyTuple_GetItem(THE(module_hooks), i)) != 0)
            return NULL;
    if ((found = GET(kind, forward)) == NULL)
        return NULL;
    Py_DECREF(found);
    if (found != PyTuple_GetItem(known, 0) || is_asked() != YES)
        return NULL;
    call.args[0] = batch;
    call.name_count = (int)PyLong_AsLong(PyTuple_GetItem(known, 2));
    call.arg_count = (int)PyTuple_Size(known) - 2 - call.name_count;
    for (int i = 1; i < call.arg_count + call.name_count; i++) {
        PyObject *name = PyTuple_GetItem(known, i + 2);
        if ((call.args[i] = attribute_of(of_module, name)) == NULL)
            return NULL;
        if (i >= call.arg_count)
            call.names[i - call.arg_count] = name;
    }
    found = PyTuple_GetItem(known, 1);
    if (found == THE(identity))
        return ref(batch);
    out = replayed(&call, found, &described);
    return out == NULL && !PyErr_Occurred() && described == YES ? by_dispatch(&call, found) : out;
}

/* call_module(calls, original, module, args, kwargs): make a module call; `ModuleCalls.unusual` makes those that are not
   ordinary. */
static PyObject *call_module(PyObject *self, PyObject *const *values, Py_ssize_t count)
{
    PyObject *out = NULL, *module, *args, *of_module, *all;
    int ordinary = NO;
    if (count != 5 || !PyTuple_Check(values[3]) || !PyDict_Check(values[4])) {
        PyErr_SetString(PyExc_TypeError, "call_module takes calls, original, module, args, kwargs");
        return NULL;
    }
    module = values[2];
    args = values[3];
    Py_ssize_t arg_count = PyTuple_Size(args);
    if (arg_count > 0 && (PyObject *)Py_TYPE(PyTuple_GetItem(args, 0)) == THE(batch)) {
        if ((of_module = PyObject_GenericGetDict(module, NULL)) == NULL)
            return NULL;
        ordinary = is_ordinary_module(values[0], module, of_module);
        if (ordinary == YES && arg_count == 1 && PyDict_Size(values[4]) == 0)
            out = leaf(module, of_module, PyTuple_GetItem(args, 0));
        Py_DECREF(of_module);
    }
    if (ordinary != YES) {
        PyErr_Clear();
        return PyObject_CallMethodObjArgs(values[0], NAME(unusual), values[1], module, args, values[4], NULL);
    }
    if (out != NULL || PyErr_Occurred())
        return out;
    if ((all = PyTuple_New(arg_count + 1)) == NULL)
        return NULL;
    PyTuple_SetItem(all, 0, ref(module));
    for (Py_ssize_t i = 0; i < arg_count; i++)
        PyTuple_SetItem(all, i + 1, ref(PyTuple_GetItem(args, i)));
    out = PyObject_Call(values[1], all, values[4]);
    Py_DECREF(all);
    return out;
}

/* --- set up */

/* configure(functions, tensor, address, objects): set what the names stand for; False if this torch is unknown.
   functions: addresses, by name. address: of what the handle of a tensor refers to. */
static PyObject *configure(PyObject *self, PyObject *arguments)
{
    PyObject *functions_of, *tensor, *address, *named, *size;
    if (!PyArg_ParseTuple(arguments, "O!OOO!", &PyDict_Type, &functions_of, &tensor, &address, &PyDict_Type, &named))
        return NULL;
    forget_all();
    for (int i = 0; i < COUNT; i++) {
        PyObject *object = PyDict_GetItemString(named, names[i]);
        if (object == NULL) {
            PyErr_SetString(PyExc_TypeError, names[i]);
            return NULL;
        }
        Py_INCREF(object);
        Py_XDECREF(given[i]);
        given[i] = object;
    }
#define X(name, type)                                                                                                  \
    {                                                                                                                  \
        PyObject *number = PyDict_GetItemString(functions_of, #name);                                                  \
        name = number == NULL ? NULL : (int32_t(*)(void *, type *))PyLong_AsVoidPtr(number);                           \
        if (name == NULL) {                                                                                            \
            PyErr_SetString(PyExc_TypeError, #name);                                                                   \
            return NULL;                                                                                               \
        }                                                                                                              \
    }
    SHIMS(X)
#undef X
    if ((size = PyObject_GetAttrString((PyObject *)Py_TYPE(tensor), "__basicsize__")) == NULL)
        return NULL;
    Py_ssize_t end = PyLong_AsSsize_t(size) - (Py_ssize_t)sizeof(void *);
    void *wanted = PyLong_AsVoidPtr(address);
    Py_DECREF(size);
    for (place_of_handle = sizeof(PyObject); place_of_handle <= end; place_of_handle += sizeof(void *))
        if (*(void **)HANDLE(tensor) == wanted)
            return ref(Py_True);
    return PyErr_Occurred() ? NULL : ref(Py_False);
}

static PyMethodDef methods[] = {
    {"call", (PyCFunction)(void (*)(void))call, METH_FASTCALL | METH_KEYWORDS,
     "call(func, types, args=(), kwargs=None): a torch function of a batch."},
    {"made", (PyCFunction)(void (*)(void))made, METH_FASTCALL, "made(rows, meta): a batch of rows."},
    {"keep", (PyCFunction)(void (*)(void))keep, METH_FASTCALL,
     "keep(func, args, kwargs, key, function): find a program from now on for such calls."},
    {"program", program, METH_VARARGS, "program(all, input_count): a function that repeats recorded calls."},
    {"forget", forget, METH_NOARGS, "forget(): drop all programs."},
    {"described", described, METH_VARARGS, "described(func, args, kwargs): (words, inputs), or None."},
    {"methods_of", methods_of, METH_VARARGS, "methods_of(kind, function_of): descriptors of methods, by name."},
    {"call_module", (PyCFunction)(void (*)(void))call_module, METH_FASTCALL,
     "call_module(calls, original, module, args, kwargs): make a module call."},
    {"configure", configure, METH_VARARGS,
     "configure(functions, tensor, address, objects): set what this module uses; False if this torch is unknown."},
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
    if ((program_type = PyType_FromSpec(&program_spec)) == NULL)
        return NULL;
    PyObject *made_module = PyModule_Create(&module);
    if (made_module != NULL && PyModule_AddIntConstant(made_module, "VERSION", VERSION) < 0)
        Py_CLEAR(made_module);
    return made_module;
}
