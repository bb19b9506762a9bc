/*
 * Core: names of parameters, slots and what else checkpoints hold must not meet.
 */
#include <string.h>

#include "core.h"

static bool
has_tensor (const gq_layout *layout, const char *name)
{
    for (size_t i = 0; i < layout->tensor_count; i++)
        if (strcmp (layout->tensors[i].name, name) == 0)
            return true;
    return false;
}

/* Is a parameter called as a checkpoint would call the `prefix` of another one? */
static gq_status
check_prefix (const gq_layout *layout, const char *prefix, gq_error *error)
{
    size_t length = strlen (prefix);
    for (size_t i = 0; i < layout->tensor_count; i++) {
        const char *name = layout->tensors[i].name;
        if (strncmp (name, prefix, length) == 0 && name[length] == '.' &&
            has_tensor (layout, name + length + 1))
            return gq_fail (error, GQ_INVALID,
                            "a parameter is called %s, which is what a checkpoint calls the %s of "
                            "%s; rename one of the two parameters",
                            name, prefix, name + length + 1);
    }
    return GQ_OK;
}

/* The same for the slots of a retired rule.  Whichever retires: rules and slots are words without
 * dots. */
static gq_status
check_retired (const gq_layout *layout, gq_error *error)
{
    const size_t length = strlen (GQ_RETIRED_NAME ".");
    for (size_t i = 0; i < layout->tensor_count; i++) {
        const char *name = layout->tensors[i].name;
        const char *slot =
            strncmp (name, GQ_RETIRED_NAME ".", length) == 0 ? strchr (name + length, '.') : NULL;
        const char *parameter = slot == NULL ? NULL : strchr (slot + 1, '.');
        if (parameter != NULL && has_tensor (layout, parameter + 1))
            return gq_fail (error, GQ_INVALID,
                            "a parameter is called %s, which is what a checkpoint may call a slot "
                            "of %s; rename one of the two parameters",
                            name, parameter + 1);
    }
    return GQ_OK;
}

gq_status
gq_core_check_layout (const gq_rule *rule, const gq_layout *layout, gq_error *error)
{
    const gq_optimizer *plugin = gq_rule_plugin (rule);
    gq_status status = check_prefix (layout, GQ_HELD_NAME, error);
    if (status == GQ_OK)
        status = check_retired (layout, error);
    for (size_t k = 0; plugin->slots[k] != NULL && status == GQ_OK; k++) {
        const char *slot = plugin->slots[k];
        if (strcmp (slot, GQ_HELD_NAME) == 0 || strcmp (slot, GQ_RETIRED_NAME) == 0)
            return gq_fail (error, GQ_INVALID,
                            "rule %s has a slot %s, a word that checkpoints use for something "
                            "else; rename the slot",
                            plugin->name, slot);
        status = check_prefix (layout, slot, error);
    }
    return status;
}
